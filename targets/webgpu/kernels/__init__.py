"""The WebGPU kernels, one file a job."""
