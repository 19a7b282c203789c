#!/usr/bin/env bash
# llama_cpp_flags.sh [CPUINFO]: CMake flags for the peer of the benchmarks: this CPU's vector instructions without AMX,
# with which llama.cpp's quantized models crash on some virtual machines. (GGML_NATIVE would take AMX where the CPU names
# it.) CPUINFO is a file like /proc/cpuinfo.
set -euo pipefail
cpuinfo=${1:-/proc/cpuinfo}
if [ "$(uname -m)" != x86_64 ]; then exit 0; fi
flags="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON"
# ggml's name, and what Linux calls the instructions. Some of Linux's names have an underscore, avx512vbmi has none.
while read -r option words; do
  if grep -qwE "$words" "$cpuinfo" 2>/dev/null; then flags+=" -DGGML_$option=ON"; fi
done <<'WORDS'
AVX_VNNI avx_vnni
AVX512 avx512f
AVX512_VBMI avx512vbmi|avx512_vbmi
AVX512_VNNI avx512_vnni
AVX512_BF16 avx512_bf16
WORDS
echo "$flags"
