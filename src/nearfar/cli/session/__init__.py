"""A conversation in the terminal: what is typed, what is answered, and the commands with a slash."""
