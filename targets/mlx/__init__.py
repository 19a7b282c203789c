"""The MLX target: MLX's own kernels and file layout; what is written here are config.json and the exported function."""
