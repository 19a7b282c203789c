"""Compiles a step into kernels: Relax functions, the compile flow, plans."""
