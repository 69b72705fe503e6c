"""Writes trained weights and their tokenizer as a Hugging Face directory. No training here."""

import json

import torch
from safetensors.torch import save_file

import network

END_OF_TEXT, IM_START, IM_END = 0, 1, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MAX_NEW_TOKENS = 128
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def rendered(messages):
    """What TEMPLATE makes of messages, ready for the answer."""
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return f"{turns}<|im_start|>assistant\n"


def configs(vocab):
    """The JSON files beside weights and tokenizer."""
    ends = [IM_END, END_OF_TEXT]
    return {
        "config.json": {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
            "vocab_size": vocab, "hidden_size": network.HIDDEN, "num_hidden_layers": network.LAYERS,
            "num_attention_heads": network.HEADS, "num_key_value_heads": network.KV_HEADS,
            "head_dim": network.HEAD_DIM, "num_experts": network.EXPERTS, "num_experts_per_tok": network.TOP,
            "moe_intermediate_size": network.WIDTH, "intermediate_size": network.WIDTH, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu", "rms_norm_eps": network.EPS,
            "max_position_embeddings": network.POSITIONS, "tie_word_embeddings": True, "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": network.THETA},
            "use_sliding_window": False, "sliding_window": None, "bos_token_id": None, "eos_token_id": ends,
            "pad_token_id": END_OF_TEXT,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": network.POSITIONS,
            "eos_token": SPECIAL[IM_END], "pad_token": SPECIAL[END_OF_TEXT],
            "clean_up_tokenization_spaces": False, "chat_template": TEMPLATE,
        },
        "generation_config.json": {
            "do_sample": False, "temperature": 0.0, "max_new_tokens": MAX_NEW_TOKENS, "eos_token_id": ends,
            "pad_token_id": END_OF_TEXT,
        },
    }


def export(weights, tokenizer, out):
    """Weights go to bf16."""
    out.mkdir(parents=True, exist_ok=True)
    rounded = {name: value.detach().to(torch.bfloat16) for name, value in weights.items()}
    save_file(rounded, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    for name, config in configs(tokenizer.get_vocab_size()).items():
        (out / name).write_text(json.dumps(config, indent=2) + "\n")
