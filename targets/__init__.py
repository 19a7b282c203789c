"""Targets: what artifacts are built for. One folder each: kernels, packing of weights, code generation.

A folder with a target.py has `TARGET`, a record of kernels/planned.py: all that the pipeline knows of it. The
other folders hold what is written for a library that brings kernels of its own; build/targets/ uses them.
"""
