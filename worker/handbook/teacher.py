"""The teacher: a sentence encoder that read much before, fine-tuned to tell which entry a question asks for.

    python teacher.py --encoder DIR --work DIR [--epochs N] [--corpus N] [--threads N]

The encoder is all-MiniLM-L6-v2 (Apache-2.0) as a Hugging Face directory; nothing of it is in the built-in model but what
it says about questions. Writes into --work its weights, labelled questions for `train.py` and vectors of words.
"""

import argparse
import pathlib
import random
import time

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional as F

import corpus
import data
from lexical import Lexical

LAYERS, HEADS, WIDTH, EPS = 6, 12, 384, 1e-12
BATCH, POOL = 64, 8
RATE, HEAD_RATE, WARM_UP = 2e-4, 1e-2, 30
DROPOUT, SMOOTHING = 0.1, 0.05
# Logits are this times the cosine of a question and an entry.
SHARPNESS = 20.0
LONGEST = 64
# Words of English that get a vector though no question has them.
COMMON = 4500
# What words and letters say counts so much beside what the encoder says.
LEXICAL_SHARE = 0.3
# Words and the lower layers stay as they came.
TRAINED = tuple(f"encoder.layer.{i}." for i in range(4, LAYERS))


class Teacher:
    """A BERT with a mean over its tokens and one vector for each topic."""

    def __init__(self, folder, topics, state=None):
        raw = load_file(folder / "model.safetensors") if state is None else state["weights"]
        # `detach`: what comes from a saved state would otherwise remember its own history.
        self.weights = {name.removeprefix("bert."): value.detach() for name, value in raw.items()}
        self.head = torch.randn(topics, WIDTH) * 0.02 if state is None else state["head"]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(LONGEST)

    def common(self):
        """The commonest words of English: the encoder's vocabulary is in their order."""
        order = sorted(self.tokenizer.get_vocab().items(), key=lambda pair: pair[1])
        return [word for word, _ in order if word.isascii() and word.isalpha() and len(word) > 2][:COMMON]

    def tensors(self, texts):
        rows = [self.tokenizer.encode(text).ids for text in texts]
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        mask = torch.zeros(ids.shape)
        for row, values in enumerate(rows):
            ids[row, : len(values)] = torch.tensor(values)
            mask[row, : len(values)] = 1
        return ids, mask

    def linear(self, name, x):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, name, x):
        return F.layer_norm(x, (WIDTH,), self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], EPS)

    def vectors(self, texts, dropout=0.0):
        """A vector of length one for each text."""
        ids, mask = self.tensors(texts)
        batch, length = ids.shape
        hidden = {"p": dropout, "training": dropout > 0}
        part = "embeddings"
        x = self.weights[f"{part}.word_embeddings.weight"][ids] + self.weights[f"{part}.position_embeddings.weight"][:length]
        x = self.norm(f"{part}.LayerNorm", x + self.weights[f"{part}.token_type_embeddings.weight"][0])
        bias = ((1 - mask) * -1e9)[:, None, None, :]
        for i in range(LAYERS):
            layer = f"encoder.layer.{i}"
            query, key, value = (
                self.linear(f"{layer}.attention.self.{part}", x).view(batch, length, HEADS, -1).transpose(1, 2)
                for part in ("query", "key", "value"))
            seen = F.scaled_dot_product_attention(query, key, value, attn_mask=bias.to(query.dtype))
            seen = self.linear(f"{layer}.attention.output.dense", seen.transpose(1, 2).reshape(batch, length, WIDTH))
            x = self.norm(f"{layer}.attention.output.LayerNorm", x + F.dropout(seen, **hidden))
            wide = F.gelu(self.linear(f"{layer}.intermediate.dense", x))
            x = self.norm(f"{layer}.output.LayerNorm", x + F.dropout(self.linear(f"{layer}.output.dense", wide), **hidden))
        mean = (x.float() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return F.normalize(mean, dim=-1)

    def logits(self, texts, dropout=0.0):
        return SHARPNESS * self.vectors(texts, dropout) @ F.normalize(self.head, dim=-1).T

    @torch.no_grad()
    def of_all(self, texts, function):
        """`function` of many texts, those of a length together."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        out, began = None, time.time()
        for start in range(0, len(order), 2 * BATCH):
            rows = order[start: start + 2 * BATCH]
            with torch.autocast("cpu", torch.bfloat16):
                part = function([texts[i] for i in rows]).float()
            out = torch.zeros(len(texts), part.shape[1]) if out is None else out
            out[rows] = part
            if start % (40 * BATCH) == 0:
                print(f"  {start} of {len(texts)} in {time.time() - began:.0f} s", flush=True)
        return out


def fine_tune(teacher, pairs, epochs, seed):
    """Shows `pairs` of question and topic, varied as people type."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    teacher.head.requires_grad_(True)
    weights = [w.requires_grad_(True) for name, w in teacher.weights.items() if name.startswith(TRAINED)]
    optimiser = torch.optim.AdamW([{"params": weights, "peak": RATE}, {"params": [teacher.head], "peak": HEAD_RATE}],
                                  weight_decay=0.01)
    steps, order, cut, began = epochs * len(pairs) // BATCH, [], [], time.time()
    for step in range(steps):
        if not cut:
            while len(order) < POOL * BATCH:
                order += rng.sample(pairs, len(pairs))
            pool, order = order[: POOL * BATCH], order[POOL * BATCH:]
            pool = [(data.varied(q, rng) if rng.random() < 0.6 else q, topic) for q, topic in pool]
            pool.sort(key=lambda pair: len(pair[0]))
            cut = [pool[i: i + BATCH] for i in range(0, len(pool), BATCH)]
            rng.shuffle(cut)
        batch = cut.pop()
        for group in optimiser.param_groups:
            group["lr"] = group["peak"] * min(1.0, (step + 1) / WARM_UP) * max(0.02, 1 - step / steps)
        with torch.autocast("cpu", torch.bfloat16):
            logits = teacher.logits([q for q, _ in batch], DROPOUT).float()
        loss = F.cross_entropy(logits, torch.tensor([topic for _, topic in batch]), label_smoothing=SMOOTHING)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 20 == 0:
            print(f"teacher {step} of {steps}: loss {loss.item():.3f}, {time.time() - began:.0f} s", flush=True)


def labelled(teacher, lexical, texts):
    """Log-probabilities of the topics of each text."""
    read = teacher.of_all(texts, teacher.logits).log_softmax(-1)
    return ((1 - LEXICAL_SHARE) * read + LEXICAL_SHARE * lexical.log_chances(texts)).log_softmax(-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--corpus", type=int, default=60_000)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    topics = data.topics(data.entries())
    pairs = [(q, i) for i, topic in enumerate(topics) for q in topic.asked()]
    path = args.work / "teacher.pt"
    if not path.exists():
        teacher = Teacher(args.encoder, len(topics))
        fine_tune(teacher, pairs, args.epochs, 1)
        torch.save({"weights": teacher.weights, "head": teacher.head}, path)
    teacher, lexical = Teacher(args.encoder, len(topics), torch.load(path)), Lexical(pairs)
    check = [(q, i) for i, topic in enumerate(topics) for q in topic.checked()]
    said = labelled(teacher, lexical, [q for q, _ in check]).argmax(-1)
    right = (said == torch.tensor([i for _, i in check])).float().mean()
    print(f"teacher: {right:.3f} of {len(check)} questions right that it was not shown", flush=True)
    own = corpus.words(topics)
    words = own + [word for word in teacher.common() if word not in set(own)]
    vectors = teacher.of_all(words, teacher.vectors)
    torch.save({"words": words, "vectors": vectors}, args.work / "words.pt")
    made = corpus.made(topics, corpus.neighbours(words, vectors), args.corpus, 2)
    texts = [text for text, _ in made]
    torch.save({"texts": texts, "topics": [topic for _, topic in made], "logits": labelled(teacher, lexical, texts).half()},
               args.work / "corpus.pt")


if __name__ == "__main__":
    main()
