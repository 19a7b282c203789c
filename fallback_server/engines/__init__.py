"""Engines of the server: the layer between an API request and a model."""
