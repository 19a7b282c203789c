"""The GPU kernels, one file for each job."""
