"""The model as data: what a step computes, and from which weights.

Every target reads this package, so it imports neither TVM nor MLX nor torch.
"""
