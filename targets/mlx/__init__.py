"""The MLX target: MLX's own kernels and files; written here: config.json and the exported function."""
