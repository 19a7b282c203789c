"""Engines as replicas on a Ray cluster, and the backend that uses them."""
