"""The CPU: plans replayed by the artifact's own shared library."""
