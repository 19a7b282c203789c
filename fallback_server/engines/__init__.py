"""Engines of the server: what stands between a request of the API and a model."""
