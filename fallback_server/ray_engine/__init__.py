"""Engines as replicas on a Ray cluster, and the backend in front of them."""
