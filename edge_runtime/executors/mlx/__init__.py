"""Runs MLX artifacts: graphs over MLX arrays, on Apple's GPUs through Metal, elsewhere on the CPU."""
