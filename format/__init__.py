"""The artifact's format: everything that the build writes and a runtime reads, stated once."""
