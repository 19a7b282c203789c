"""The HTTP side of the server: APIs, limits, keys, metrics."""
