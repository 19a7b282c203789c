"""What the launches of a step cost: `nearfar bench kernels`."""
