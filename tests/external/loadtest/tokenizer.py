"""Makes a folder with a tokenizer that AIPerf and GuideLLM can load without any download: bytes, and the pairs of them
that are frequent in a short text. Usage: tokenizer.py FOLDER."""

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = "the quick brown fox jumps over the lazy dog and people ask what a cache of keys and values can hold ".split()

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=1000,
    special_tokens=["<s>", "</s>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
)
tokenizer.train_from_iterator([" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))], trainer)
folder = Path(sys.argv[1])
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    bos_token="<s>",
    eos_token="</s>",
    chat_template="{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
).save_pretrained(folder)
print(folder)
