"""Turns the benchmark's checkpoint into GGUF files that llama.cpp reads: bf16, int8 (Q8_0) and int4 (Q4_0, the embeddings,
which are the head, in Q8_0 as our `--quantize int4` keeps them). No vocabulary: only token ids are used.

    gguf_model.py DIR      reads DIR/config.json and DIR/model.safetensors, writes DIR/{bf16,int8,int4}.gguf
"""

import json
import struct
import sys
from pathlib import Path

import gguf
import numpy as np

PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TYPES = gguf.GGMLQuantizationType


def tensors(path: Path):
    """Yields (name, bf16 bits of the tensor's shape)."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    data = np.memmap(path, np.uint16, "r", offset=8 + length)
    for name, entry in header.items():
        begin, end = (offset // 2 for offset in entry["data_offsets"])
        yield name, data[begin:end].reshape(entry["shape"])


def gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, *part, _ = name.split(".")
    return f"blk.{layer}.{PARTS['.'.join(part)]}.weight"


def write(source: Path, target: Path, config: dict, layers: TYPES, head: TYPES) -> None:
    writer = gguf.GGUFWriter(target, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, bits in tensors(source):
        kept = layers if bits.ndim == 2 else TYPES.F32
        kept = head if "embed" in name else kept
        if kept == TYPES.BF16:
            data = np.ascontiguousarray(bits).view(np.uint8)
        else:
            data = gguf.quantize((bits.astype(np.uint32) << 16).view(np.float32), kept)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    model = Path(sys.argv[1])
    config = json.loads((model / "config.json").read_text())
    for name, layers, head in [
        ("bf16", TYPES.BF16, TYPES.BF16),
        ("int8", TYPES.Q8_0, TYPES.Q8_0),
        ("int4", TYPES.Q4_0, TYPES.Q8_0),
    ]:
        write(model / "model.safetensors", model / f"{name}.gguf", config, layers, head)


if __name__ == "__main__":
    main()
