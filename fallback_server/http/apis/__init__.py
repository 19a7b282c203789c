"""The APIs that the server speaks. Each has the fields of its requests, their form as a chat completion, and
the shape of its answers.
"""
