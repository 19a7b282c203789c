"""OpenAI-compatible cloud server (not built yet)."""
