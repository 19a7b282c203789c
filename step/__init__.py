"""The model as data: what a step computes, from which weights. No TVM, MLX or torch here; every target
reads it.
"""
