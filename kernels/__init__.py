"""What kernels are asked for, and what targets with kernels offer: records of the build and all targets."""
