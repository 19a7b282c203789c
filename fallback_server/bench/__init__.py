"""`nearfar bench serve`: puts load on a server with OpenAI's interface and measures how it answers."""
