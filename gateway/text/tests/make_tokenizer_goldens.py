"""Writes data/tokenizers/*.json and *.jsonl: small tokenizers with the pipelines of real model families, trained on text
written here, and what transformers makes of TEXTS with them, to compare `tokenizer.rs` and `decode.rs` with.
Run with transformers 5.23 and tokenizers 0.23 after changing a case:

    python make_tokenizer_goldens.py

Each family is a checkpoint directory's text side: tokenizer.json, tokenizer_config.json, goldens.jsonl. A golden is
{"text", "plain": ids without special tokens added, "before" and "after": the ids that adding them puts around,
"decoded": text of "plain" without special tokens, where it is not "text"}."""

import json
import pathlib
import shutil
import string

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

DATA = pathlib.Path(__file__).parent / "data" / "tokenizers"

CORPUS = """The quick brown fox jumps over the lazy dog, and the dog doesn't mind; it's used to foxes by now.
In 1999 there were 12345 foxes, in 2024 there were 67890, and nobody counted the dogs. They'll count, they've said.
def count(animals):\n    return sum(1 for a in animals if a.kind == "fox")\n\n\tif x != y: print(f"{x} > {y}")
Grüße aus Łódź: die Katze läuft über die Straße. Ça va? Où est l'élève? ¿Qué tal, señor? Привет, как дела? Γειά σου.
東京は日本の首都です。北京是中国的首都。안녕하세요, 서울은 한국의 수도입니다. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया
😀 👩‍👩‍👧 👍🏽 🇵🇱 — “quotes” … (brackets) [list] {"json": true, "n": 1.5e-7} <b>bold</b> &amp; https://example.org/a?b=c#d
""".split("\n") * 4

TEXTS = [
    "",
    " ",
    "   ",
    "Hello, world!",
    " leading and trailing ",
    "  two  blanks   three    four",
    "a\tb\t\tc\n\nd\r\ne\rf \n g\n ",
    "it's I'M you'Re they'LL he'D 'S",
    "1 12 123 1234 12345 1234567890 3.14159 1,000,000 ٣٤٥ ½ ²",
    "naïve café vs nai\u0308ve cafe\u0301 e\u0301\u0323 A\u030a \ufb01 \u212b",
    "Grüße aus Łódź, straße STRASSE ǅ İı",
    "東京は日本の首都です。北京是中国的首都。漢字かな交じり文123テスト",
    "안녕하세요 서울 \u1112\u1161\u11ab",
    "שלום עולם مرحبا بالعالم \u202bRTL\u202c",
    "नमस्ते दुनिया ไทยภาษา",
    "😀 👩‍👩‍👧 👍🏽 🇵🇱🇩🇪 ❤️ \U0001f9d1\u200d\U0001f680",
    "zero\u200bwidth \u00a0nbsp\u00a0 \u2028line\u2029para \ufeffbom \u3000wide",
    "\x00\x01\x7f control \x1b[0m",
    "<|im_start|>user\nhi<|im_end|>\n",
    "text <|im_end|> in <|im_end|>the middle<|im_end|>",
    "<|im_end|",
    "<|im_ end|> <|IM_END|> < |im_end|> <|im_end|>>",
    "<s>[INST] hi [/INST]</s> <s> </s>",
    "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>",
    "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>",
    "a <mask> b<mask>c  <mask>  d <pad> e<pad>f  <pad>  g",
    "<extra><extra> <Extra> x<extra>y",
    "snake_case camelCase PascalCase HTTPServer x86_64 v1.2.3",
    "def f(x):\n    if x:\n        return {'a': [1, 2]}\n\n\n    # end\n",
    "!!!???...---___***///\\\\\\ @#$%^&*() `~",
    "http://user:pass@example.org:8080/päth?q=1&r=%20#frag",
    "x" * 200,
    "ab" * 50 + " " * 70 + "!" * 40,
    "\n" * 20 + " \n \n\t\n",
    ("The quick brown fox — Grüße 東京 😀 12345\n" * 300)[:10000],
]


def bytelevel(pattern, digits=None):
    parts = digits or []
    parts = parts + [pre_tokenizers.Split(Regex(pattern), "isolated", invert=False)] if pattern else parts
    return pre_tokenizers.Sequence(parts + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def trained(tokenizer, special, vocab_size=600, alphabet=True, **more):
    initial = pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=initial, show_progress=False, **more
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def special(*names):
    return [AddedToken(n, special=True, normalized=False) for n in names]


def llama3():
    """tiktoken style: the regex takes up to three digits, contractions in any case; merges are ignored for whole words."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = bytelevel(pattern)
    tokenizer.decoder = decoders.ByteLevel()
    trained(tokenizer, [])
    tokenizer.add_special_tokens(
        special("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    )
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    template = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|>:1 $B:1",
        special_tokens=[("<|begin_of_text|>", bos)],
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer, {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|eot_id|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "__type": "AddedToken"}}


def qwen():
    """NFC, single digits, ChatML; tokens that are added but not special are kept in decoded text."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = bytelevel(pattern)
    tokenizer.decoder = decoders.ByteLevel()
    trained(tokenizer, [])
    tokenizer.add_special_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer, {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "add_bos_token": False}


def gpt_oss():
    """o200k's regex, which knows cases, and harmony's special tokens."""
    pattern = "|".join([
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ])
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = bytelevel(pattern)
    tokenizer.decoder = decoders.ByteLevel()
    trained(tokenizer, [])
    tokenizer.add_special_tokens(
        special("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
                "<|message|>", "<|call|>")
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer, {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"}


def mixtral():
    """SentencePiece's BPE as converted for Llama 2 and Mixtral: blanks become ▁, unknown characters bytes."""
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    prepend = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.normalizer = prepend
    letters = list(string.ascii_letters + string.digits + string.punctuation + "▁äöüßé")
    trained(tokenizer, ["<unk>", "<s>", "</s>"] + byte_tokens, 700, alphabet=False, limit_alphabet=40)
    # Keeps the letters that the corpus lacks out: they are bytes. Those above are known.
    raw = json.loads(tokenizer.to_str())
    vocab = raw["model"]["vocab"]
    for letter in letters:
        vocab.setdefault(letter, len(vocab))
    raw["added_tokens"] = [
        {"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i, t in enumerate(["<unk>", "<s>", "</s>"])
    ]
    tokenizer = Tokenizer.from_str(json.dumps(raw))
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True, "legacy": False}


def deepseek():
    """Three splits after each other: digits, CJK, and the rest; special tokens with full-width bars."""
    cjk = pre_tokenizers.Split(Regex("[一-龥\u3040-ゟ゠-ヿ]+"), "isolated")
    numbers = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
    pattern = (
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = bytelevel(pattern, [numbers, cjk])
    tokenizer.decoder = decoders.ByteLevel()
    trained(tokenizer, [])
    tokenizer.add_special_tokens(special("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"))
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")])
    bos = tokenizer.token_to_id("<｜begin▁of▁sentence｜>")
    template = processors.TemplateProcessing(
        single="<｜begin▁of▁sentence｜> $A", pair="<｜begin▁of▁sentence｜> $A $B",
        special_tokens=[("<｜begin▁of▁sentence｜>", bos)],
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer, {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": {"__type": "AddedToken", "content": "<｜end▁of▁sentence｜>", "lstrip": False, "rstrip": False, "normalized": True, "single_word": False}, "add_bos_token": True}


def added():
    """Added tokens that take the blanks beside them, stand only as whole words, or are matched in normalised text; some
    of them only described in tokenizer_config.json, as older checkpoints have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trained(tokenizer, [], 400)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<pad>", rstrip=True, normalized=False), AddedToken("<extra>", normalized=True)])
    tokenizer.add_tokens([AddedToken("fox", single_word=True, normalized=False)])
    size = tokenizer.get_vocab_size()
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    decoder = {
        str(size): {"content": "<late>", **flags, "special": True},
        str(size + 1): {"content": "[INST]", **flags, "rstrip": True, "special": False},
    }
    return tokenizer, {"bos_token": None, "eos_token": "<eos>", "mask_token": "<mask>", "added_tokens_decoder": decoder}


FAMILIES = {f.__name__: f for f in (llama3, qwen, gpt_oss, mixtral, deepseek, added)}
MORE_TEXTS = {"added": ["a <late> b<late>", "[INST]  x [INST]y", "the FOX and fox, foxes a_fox", "x<eos>y <EOS>", " <mask>", "<pad> "]}


def main():
    shutil.rmtree(DATA, ignore_errors=True)
    for name, build in FAMILIES.items():
        folder = DATA / name
        folder.mkdir(parents=True)
        tokenizer, config = build()
        # Compact: half the size.
        text = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))
        (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
        config = {**config, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        reference = PreTrainedTokenizerFast.from_pretrained(folder)
        lines = []
        for text in TEXTS + MORE_TEXTS.get(name, []):
            plain = reference.encode(text, add_special_tokens=False)
            whole = reference.encode(text)
            at = next(i for i in range(len(whole) + 1) if whole[i : i + len(plain)] == plain)
            line = {"text": text, "plain": plain, "before": whole[:at], "after": whole[at + len(plain) :]}
            decoded = reference.decode(plain, skip_special_tokens=True)
            lines.append(line if decoded == text else {**line, "decoded": decoded})
        head = {
            "eos_token_id": reference.eos_token_id,
            "vocab_size": len(reference),
            "special_tokens": {t: reference.convert_tokens_to_ids(t) for t in reference.all_special_tokens},
        }
        out = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in [head, *lines])
        (folder / "goldens.jsonl").write_text(out, encoding="utf-8")
        tokens = sum(len(line["plain"]) for line in lines)
        print(f"{name}: {len(lines)} texts, {tokens} tokens, vocabulary {len(reference)}")


if __name__ == "__main__":
    main()
