"""OpenAI's interface to an engine: chat, completions, embeddings, their parameters, records and streams."""
