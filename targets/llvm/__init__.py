"""Compiles kernels in TIR with LLVM, for cpu and wasm.

Nothing here knows jobs, models or vector units. So a change to those leaves a kernel's kept object file valid
if the kernel's TIR stays the same (build/program/kept.py).
"""
