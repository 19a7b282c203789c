"""The records between the build and the targets: the jobs of kernels, and what a target with
kernels offers.
"""
