"""`nearfar bench kernels`: times and bytes of each launch of a step."""
