"""One folder per target: kernels, packing, code generation, device limits."""
