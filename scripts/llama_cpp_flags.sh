#!/usr/bin/env bash
# CMake flags for the peer of the benchmarks: this CPU's vector instructions without AMX, with which llama.cpp's
# quantized models crash on some virtual machines. (GGML_NATIVE would take AMX where the CPU names it.)
set -euo pipefail
has() { grep -qw "$1" /proc/cpuinfo 2>/dev/null; }
if [ "$(uname -m)" != x86_64 ]; then exit 0; fi
flags="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON"
if has avx512f; then flags+=" -DGGML_AVX512=ON"; fi
if has avx512vbmi || has avx512_vbmi; then flags+=" -DGGML_AVX512_VBMI=ON"; fi
if has avx512_vnni; then flags+=" -DGGML_AVX512_VNNI=ON"; fi
if has avx512_bf16; then flags+=" -DGGML_AVX512_BF16=ON"; fi
echo "$flags"
