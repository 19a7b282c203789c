"""The Vulkan runtime: a device chosen, memory planned once, plans recorded once and resubmitted."""
