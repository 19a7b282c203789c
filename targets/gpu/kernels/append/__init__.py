"""Kernels between a projection and attention: norms of heads, rotation, append to the cache."""
