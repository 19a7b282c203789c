"""The MLX target's config.json; kernels and weight files are MLX's own."""
