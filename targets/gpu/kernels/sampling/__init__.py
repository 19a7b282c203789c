"""Kernels that choose a token from logits."""
