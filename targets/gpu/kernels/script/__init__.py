"""The language in which kernels are written, and its vectors of four values."""
