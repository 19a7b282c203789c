"""Device-or-cloud decision (not built yet)."""
