"""OpenAI's interface to an engine: chat, completions, their parameters, records and streams."""
