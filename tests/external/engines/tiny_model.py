"""Writes a tiny model with random weights that vLLM serves on a CPU, or a LoRA adapter of one: its numbers mean nothing, its cache is a
real one.

full: every layer keeps all of a prompt (Qwen3). deep: the same, so large that a prompt takes its time. agent: as full, with a template
that shows tools and their calls. varied: as agent, with weights so large that its text differs from token to token.
window: of six layers five keep the last 128 tokens alone (Gemma 3), so that its cache has groups, of which the one that keeps all comes
last. sees: pictures stand among the text (Qwen2-VL), a token for each 16 by 16 pixels where its makers' have 28 by 28, so that their
price is nobody's guess. Run with the Python that has vLLM.
"""

import argparse
import json
import pathlib

import safetensors.torch
import tokenizers
import torch
import transformers

WORDS = pathlib.Path(__file__).read_text() + " Grüße aus 東京 🙂 0123456789\t\n{}[]()<>"
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
# All that an agent's conversation has; what the system says may stand anywhere.
AGENT = ("{% if tools %}<tools>{{ tools | tojson }}\n{% endif %}{% for message in messages %}<{{ message['role'] }}>"
         "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message['content'] }}"
         "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}\n{% endfor %}"
         "{% if add_generation_prompt %}<assistant>{% endif %}")
WINDOW = 128
PICTURE = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
# A picture stays where it is among the parts of a message.
PARTS = ("{% for message in messages %}<{{ message['role'] }}>{% if message['content'] is string %}{{ message['content'] }}{% else %}"
         "{% for part in message['content'] %}{% if part['type'] == 'image' %}" + "".join(PICTURE[:3]) + "{% else %}{{ part['text'] }}{% endif %}"
         "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")
PATCH, MERGED = 8, 2


def config(kind):
    common = {"vocab_size": 384, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1,
              "head_dim": 64, "max_position_embeddings": 8192, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
              "tie_word_embeddings": True}
    if kind in ("full", "agent"):
        return transformers.Qwen3Config(num_hidden_layers=2, **common)
    if kind == "deep":
        return transformers.Qwen3Config(num_hidden_layers=12, **{**common, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8})
    if kind == "varied":
        return transformers.Qwen3Config(num_hidden_layers=2, initializer_range=0.3, **{**common, "tie_word_embeddings": False})
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    return transformers.Gemma3TextConfig(num_hidden_layers=6, layer_types=layers, sliding_window=WINDOW, query_pre_attn_scalar=64,
                                         **common)


def seeing_config(ids):
    """Of a model that sees, whose special tokens have these ids."""
    text = {"vocab_size": 384, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "max_position_embeddings": 8192, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
            "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}}
    vision = {"depth": 1, "embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2, "num_heads": 2, "patch_size": PATCH,
              "spatial_merge_size": MERGED}
    start, image, end, video = ids
    return transformers.Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=image, video_token_id=video,
                                      vision_start_token_id=start, vision_end_token_id=end, tie_word_embeddings=True)


def write_seeing(folder):
    """A model and all that turns pictures into its patches."""
    words = tokenizer(PICTURE, PARTS)
    config = seeing_config(words.convert_tokens_to_ids(PICTURE))
    model = transformers.Qwen2VLForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    # A picture of 512 by 512 pixels is as it was, a larger one is made as small.
    sizes = {"patch_size": PATCH, "merge_size": MERGED, "size": {"shortest_edge": (PATCH * MERGED) ** 2, "longest_edge": 512 * 512}}
    processor = transformers.Qwen2VLProcessor(transformers.Qwen2VLImageProcessor(**sizes), words,
                                              transformers.Qwen2VLVideoProcessor(**sizes), chat_template=PARTS)
    processor.save_pretrained(folder)


def tokenizer(more=(), template=TEMPLATE):
    bytewise = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = bytewise(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=384, special_tokens=["<s>", "</s>", *more], show_progress=False,
                                             initial_alphabet=bytewise.alphabet())
    made.train_from_iterator([WORDS], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    return fast


def write_adapter(folder):
    """Of full's model: its queries and values in both layers."""
    folder.mkdir(exist_ok=True)
    says = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(says))
    weights = {}
    for layer in range(2):
        for module, out in (("q_proj", 128), ("v_proj", 64)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(8, 128, dtype=torch.bfloat16)
            weights[f"{name}.lora_B.weight"] = torch.randn(out, 8, dtype=torch.bfloat16)
    safetensors.torch.save_file(weights, folder / "adapter_model.safetensors")


def main():
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("kind", choices=("full", "deep", "agent", "varied", "window", "sees", "adapter"))
    parse.add_argument("folder", type=pathlib.Path)
    parse.add_argument("--seed", type=int, default=1)
    args = parse.parse_args()
    torch.manual_seed(args.seed)
    if args.kind == "adapter":
        return write_adapter(args.folder)
    if args.kind == "sees":
        return write_seeing(args.folder)
    model = transformers.AutoModelForCausalLM.from_config(config(args.kind), dtype=torch.bfloat16)
    model.save_pretrained(args.folder)
    tokenizer(template=AGENT if args.kind in ("agent", "varied") else TEMPLATE).save_pretrained(args.folder)


main()
