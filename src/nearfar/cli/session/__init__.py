"""A conversation in the terminal: input, answers, and the commands with a slash."""
