"""WebGPU through wgpu: plans as compute passes."""
