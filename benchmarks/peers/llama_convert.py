"""llama.cpp's way from a checkpoint to Q4_0: `convert CHECKPOINT F16.gguf`, then `quantize F16.gguf
Q4_0.gguf`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """Name of a Hugging Face tensor in a GGUF file."""
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in fixed:
        return fixed[name]
    _, _, layer, *rest, kind = name.split(".")
    return f"blk.{layer}.{NAMES['.'.join(rest)]}.{kind}"


def convert(checkpoint: Path, output: Path) -> None:
    """Write all tensors as float16 (vectors as float32). The values' order within heads does not matter
    for time.
    """
    import gguf
    import numpy as np

    from nearfar.build.weights.opening import open_checkpoint
    from nearfar.build.weights.quantize import to_float32
    from peers.gguf_model import _add_shape, _add_tokenizer

    source = open_checkpoint(checkpoint)
    writer = gguf.GGUFWriter(output, "llama", use_temp_file=False)
    _add_shape(writer, source.config)
    _add_tokenizer(
        writer, source.config, json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    )
    for name, shape in source.shapes.items():
        kind = np.dtype(np.float32 if len(shape) == 1 else np.float16)
        writer.add_tensor_info(gguf_name(name), shape, kind, int(np.prod(shape)) * kind.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in source.shapes.items():
        array = to_float32(source.read(name))
        writer.write_tensor_data(array if len(shape) == 1 else array.astype(np.float16))
    writer.close()


def quantize(source: Path, output: Path) -> None:
    """llama.cpp's own quantizer, to Q4_0."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    params.nthread = 0
    params.pure = True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(output).encode(), params):
        raise SystemExit("llama.cpp could not quantize the file")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    {"convert": convert, "quantize": quantize}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
