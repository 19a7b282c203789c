"""A token from logits."""
