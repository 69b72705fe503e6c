"""Trains the built-in model on the handbook and writes it as a Hugging Face directory. See README.md beside it.

    python train.py [--steps N] [--out DIR] [--work DIR] [--threads N] [--init DIR]

Seeded; interrupted, it goes on from the last state in --work. With --init it begins with the weights and the tokenizer
of such a directory, at a tenth of the learning rate: enough for answers that changed.
"""

import argparse
import itertools
import math
import pathlib
import random
import time

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F

import data
import network
from export import END_OF_TEXT, IM_END, SPECIAL, export, rendered

SEED = 20261121
VOCAB = 1536
BATCH = 48
PEAK_RATE = 3e-3
# Of weights that are trained already.
AGAIN_RATE = 3e-4
WARM_UP = 100
WEIGHT_DECAY = 0.05
# Share in the loss of how unevenly the experts are used.
BALANCE = 0.01
# A sample mostly ends a few tokens behind the place where its answer is told apart from all others: what decides which
# answer it is needs many examples, what follows only a few, and those later: choosing is learned first.
WHOLE_SHARE_FIRST, WHOLE_SHARE, FIRST_STEPS = 0.25, 0.45, 1200
BEYOND_DECISION = 3
# Share of a prompt's tokens that are hidden, so that no single one decides.
HIDDEN_SHARE = 0.08
# Batches of about equal lengths are cut from so many samples.
POOL = 16 * BATCH
SAVE_EVERY = 200


def make_tokenizer(everything):
    """Byte-level BPE over the handbook's own words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    text = [text for entry in everything for text in (*entry.asked(), entry.answer)]
    lower = [text.lower() for entry in everything for text in entry.asked()]
    roles = ["user\n", "assistant\n", "system\n"] * 50
    more = data.GREETINGS + data.LEADS + data.TAILS + data.SYSTEM + roles
    tokenizer.train_from_iterator(text + lower + more, trainer)
    return tokenizer


def kept_tokenizer(args, everything):
    """The one that training in `args.work`, or of `args.init`, began with, so that questions may be added on the way."""
    if args.init:
        return Tokenizer.from_file(str(args.init / "tokenizer.json"))
    path = args.work / "tokenizer.json"
    if not path.exists():
        args.work.mkdir(parents=True, exist_ok=True)
        make_tokenizer(everything).save(str(path))
    return Tokenizer.from_file(str(path))


class Samples:
    """Turns conversations into batches of prompts and answers, as ids."""

    def __init__(self, tokenizer, everything):
        self.tokenizer, self.everything = tokenizer, everything
        self.answers = {e: tokenizer.encode(e.answer).ids + [IM_END] for e in everything}
        self.decided = {e: self._decided(e) for e in everything}

    def _decided(self, entry):
        """Tokens of the answer after which it is no other's."""
        own = self.answers[entry]
        others = {tuple(ids) for ids in self.answers.values()} - {tuple(own)}
        return 1 + max(sum(1 for _ in itertools.takewhile(lambda ab: ab[0] == ab[1], zip(own, other)))
                       for other in others)

    def prompt(self, question):
        """The ids of a question alone."""
        return self.tokenizer.encode(rendered([{"role": "user", "content": question}])).ids

    def sample(self, entry, rng, whole_share):
        prompt = self.tokenizer.encode(rendered(data.conversation(entry, self.everything, rng))).ids
        answer = self.answers[entry]
        if rng.random() > whole_share:
            answer = answer[: self.decided[entry] + BEYOND_DECISION]
        hidden = [END_OF_TEXT if token > IM_END and rng.random() < HIDDEN_SHARE else token for token in prompt]
        return hidden, answer

    def batches(self, seed, first=0):
        """Endless batches from step `first` on, each of samples of about one length."""
        rng = random.Random(seed)
        order = data.shuffled(self.everything, seed)
        for step in itertools.count(first, POOL // BATCH):
            share = WHOLE_SHARE_FIRST if step < FIRST_STEPS else WHOLE_SHARE
            pool = [self.sample(entry, rng, share) for entry in itertools.islice(order, POOL)]
            pool.sort(key=lambda sample: len(sample[0]) + len(sample[1]))
            cut = [pool[i: i + BATCH] for i in range(0, len(pool), BATCH)]
            rng.shuffle(cut)
            yield from cut


def tensors(samples):
    """Ids and labels, padded on the right, where causal attention never looks."""
    width = max(len(p) + len(a) for p, a in samples)
    ids = torch.full((len(samples), width), END_OF_TEXT)
    labels = torch.full((len(samples), width), -100)
    for row, (prompt, answer) in enumerate(samples):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt): len(prompt) + len(answer)] = torch.tensor(answer)
    return ids, labels


def predictions(weights, samples):
    """Logits before each token of an answer, these tokens, the rows they stand in, and the routers' balance."""
    ids, labels = tensors(samples)
    out, balance = network.hidden(weights, ids)
    at = (labels[:, 1:] != -100).nonzero(as_tuple=True)
    logits = F.linear(out[:, :-1][at], weights["model.embed_tokens.weight"])
    return logits, labels[:, 1:][at], at[0], balance


def exact(weights, samples, questions):
    """How many of the questions get their answer word for word, decoding greedily; and how many there are."""
    right, pairs = 0, [(e, q) for e in samples.everything for q in questions(e)]
    with torch.no_grad():
        for start in range(0, len(pairs), BATCH):
            part = [(samples.prompt(q), samples.answers[e]) for e, q in pairs[start: start + BATCH]]
            logits, wanted, rows, _ = predictions(weights, part)
            right += len(part) - len(set(rows[logits.argmax(-1) != wanted].tolist()))
    return f"{right}/{len(pairs)}"


def rate(step, steps, peak):
    """The learning rate: up over WARM_UP steps, then down along a cosine."""
    fall = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps))
    return peak * min(1.0, step / WARM_UP) * fall


def make_optimiser(weights):
    """AdamW, without decay for the norms."""
    matrices = [p for p in weights.values() if p.dim() > 1]
    vectors = [p for p in weights.values() if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=PEAK_RATE, betas=(0.9, 0.98), fused=True)


def train(weights, samples, args):
    """Runs to `args.steps`, from the last saved state if there is one."""
    optimiser, path, done = make_optimiser(weights), args.work / "state.pt", 0
    args.work.mkdir(parents=True, exist_ok=True)
    if args.init:
        for name, value in load_file(args.init / "model.safetensors").items():
            weights[name].data.copy_(value)
    if path.exists():
        state = torch.load(path)
        for name, value in state["weights"].items():
            weights[name].data.copy_(value)
        optimiser.load_state_dict(state["optimiser"])
        done = state["step"]
    peak, first = (AGAIN_RATE, FIRST_STEPS) if args.init else (PEAK_RATE, 0)
    batches = itertools.islice(samples.batches(SEED, first), done, None)
    began = time.time()
    for step, batch in zip(range(done + 1, args.steps + 1), batches):
        for group in optimiser.param_groups:
            group["lr"] = rate(step, args.steps, peak)
        logits, wanted, _, balance = predictions(weights, batch)
        loss = F.cross_entropy(logits, wanted)
        (loss + BALANCE * balance).backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if step % 25 == 0:
            pace = (time.time() - began) / (step - done)
            print(f"step {step}: loss {loss.item():.4f}, {pace:.2f} s a step", flush=True)
        if step % SAVE_EVERY == 0 or step == args.steps:
            torch.save({"weights": weights, "optimiser": optimiser.state_dict(), "step": step}, path)
            known = exact(weights, samples, lambda e: [e.question])
            held = exact(weights, samples, lambda e: e.held_out)
            print(f"step {step}: questions {known}, held out {held}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3700)
    parser.add_argument("--out", type=pathlib.Path, default=data.HERE / "model")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("train-state"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--init", type=pathlib.Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    everything = data.entries()
    tokenizer = kept_tokenizer(args, everything)
    samples = Samples(tokenizer, everything)
    weights = network.initial(VOCAB, SEED)
    count = sum(p.numel() for p in weights.values())
    print(f"{len(everything)} entries, {count / 1e6:.2f} M parameters", flush=True)
    train(weights, samples, args)
    export(weights, tokenizer, args.out)


if __name__ == "__main__":
    main()
