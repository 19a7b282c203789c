"""OpenAI-compatible cloud server."""
