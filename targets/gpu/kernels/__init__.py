"""The GPU kernels, one file a job."""
