"""Checks of artifacts for browsers: chat templates and tokenizers must be among those that the web engine
follows.
"""
