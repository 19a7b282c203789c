"""The flags of the benchmarks' peer name every vector instruction of the processor, and no AMX."""

import platform
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/llama_cpp_flags.sh"
ALWAYS = ["NATIVE=OFF", "AVX2=ON", "FMA=ON", "F16C=ON"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64")
@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("avx2 fma f16c", []),
        ("avx2 avx_vnni", ["AVX_VNNI=ON"]),
        ("avx512f avx512_vbmi2", ["AVX512=ON"]),  # the second VBMI is another instruction set
        ("avx512f avx512vbmi avx512_vnni", ["AVX512=ON", "AVX512_VBMI=ON", "AVX512_VNNI=ON"]),
        ("avx512f avx512_vbmi", ["AVX512=ON", "AVX512_VBMI=ON"]),
        ("avx512f avx512_bf16 amx_tile amx_int8 amx_bf16", ["AVX512=ON", "AVX512_BF16=ON"]),
    ],
)
def test_every_vector_instruction_is_named(words: str, options: list[str], tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {words}\n")
    told = subprocess.run(["bash", SCRIPT, cpuinfo], check=True, capture_output=True, text=True).stdout
    assert told.split() == [f"-DGGML_{option}" for option in [*ALWAYS, *options]]
