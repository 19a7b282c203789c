"""The step as kernels: Relax, the compile flow, plans."""
