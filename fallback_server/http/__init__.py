"""The HTTP side: OpenAI's shapes, limits, keys, metrics."""
