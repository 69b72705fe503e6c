"""Writes a tiny model with random weights that vLLM serves on a CPU: its numbers mean nothing, its cache is a real one.

full: every layer keeps all of a prompt (Qwen3). window: of six layers five keep the last 128 tokens alone (Gemma 3), so that its cache has
groups, of which the one that keeps all comes last. Run with the Python that has vLLM.
"""

import argparse
import pathlib

import tokenizers
import torch
import transformers

WORDS = pathlib.Path(__file__).read_text() + " Grüße aus 東京 🙂 0123456789\t\n{}[]()<>"
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
WINDOW = 128


def config(kind):
    common = {"vocab_size": 384, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1,
              "head_dim": 64, "max_position_embeddings": 8192, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
              "tie_word_embeddings": True}
    if kind == "full":
        return transformers.Qwen3Config(num_hidden_layers=2, **common)
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    return transformers.Gemma3TextConfig(num_hidden_layers=6, layer_types=layers, sliding_window=WINDOW, query_pre_attn_scalar=64,
                                         **common)


def tokenizer():
    bytewise = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = bytewise(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=384, special_tokens=["<s>", "</s>"], show_progress=False,
                                             initial_alphabet=bytewise.alphabet())
    made.train_from_iterator([WORDS], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    return fast


def main():
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("kind", choices=("full", "window"))
    parse.add_argument("folder", type=pathlib.Path)
    args = parse.parse_args()
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config(args.kind), dtype=torch.bfloat16)
    model.save_pretrained(args.folder)
    tokenizer().save_pretrained(args.folder)


main()
