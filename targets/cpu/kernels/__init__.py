"""Kernels of the CPU target, one file for each job."""
