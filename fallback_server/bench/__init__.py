"""`nearfar bench serve`: load on a server with OpenAI's interface, and figures of how it bore it."""
