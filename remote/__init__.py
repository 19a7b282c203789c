"""Client of servers with OpenAI's interface, for all callers in this project. `server.py` makes the calls;
the other modules support it.
"""
