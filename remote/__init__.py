"""A server with OpenAI's interface, as everything here that calls one sees it: `server.py` calls, the rest
is what it needs.
"""
