"""Kernels of the CPU target, one file a job."""
