"""Trains the built-in model on the handbook and writes it as a Hugging Face directory. See README.md beside it.

    python train.py --work DIR [--steps N] [--minutes N] [--out DIR] [--threads N] [--init DIR]

--work has what `teacher.py` wrote. Seeded; interrupted, it goes on from the last state there. With --init it begins with
the weights and the tokenizer of such a directory, at a tenth of the learning rate: enough for answers that changed.
"""

import argparse
import math
import pathlib
import random
import time

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional as F

import data
import network
import tokens
from export import END_OF_TEXT, IM_END, export, rendered

SEED = 20261129
# Questions of a step that teaches to choose, while the network is thin and later; answers of each RECITE_EVERY-th
# later step, which teaches to recite.
THIN_CHOICES, CHOICES, RECITALS, RECITE_EVERY = 320, 160, 32, 3
PEAK_RATE, AGAIN_RATE = 4e-3, 3e-4
WARM_UP = 100
WEIGHT_DECAY = 0.05
# Share in the loss of how unevenly the experts are used.
BALANCE = 0.01
# Of the tokens of a question, so many are hidden, so that no single one decides.
HIDDEN_SHARE = 0.1
# Of so many questions words are broken into smaller pieces than needed, by leaving out this share of the merges.
BROKEN_SHARE, MERGES_LOST = 0.4, 0.2
# So many of the questions shown are people's; the others were made.
ASKED_SHARE = 0.5
# The teacher's logits are divided by this, and what is certain counts so much beside it.
TEMPERATURE, CERTAIN = 0.7, 0.7
# Share of the training in which a thin network learns to choose, for a fraction of the time.
THIN_SHARE = 0.6
# Once it is not thin, tokens change at this share of the rate.
TOKENS_RATE = 0.3
# Once phrases are recited, they are so much larger.
PHRASE_SCALE = 4.0
# So many answers are recited behind much else, of so many words at most.
LONG_SHARE, LONG_WORDS = 0.5, 500
POOL = 16
SAVE_EVERY = 250


def kept_tokenizer(args, topics, words):
    """The one that training in `args.work`, or of `args.init`, began with."""
    if args.init:
        return Tokenizer.from_file(str(args.init / "tokenizer.json"))
    path = args.work / "tokenizer.json"
    if not path.exists():
        tokens.make(topics, words).save(str(path))
    return Tokenizer.from_file(str(path))


class Samples:
    """Questions with the chances of each topic, and answers, as ids."""

    def __init__(self, tokenizer, topics, labelled):
        self.tokenizer, self.topics = tokenizer, topics
        self.first = [tokenizer.token_to_id(text) for text in tokens.beginnings(topics)]
        if None in self.first:
            raise SystemExit("an answer's beginning is no token of this tokenizer: train from the start")
        self.rows = tokens.shared_rows(tokenizer, topics)
        # Sometimes leaves out merges, so that the pieces of which an unknown word consists mean something too.
        self.breaking = Tokenizer.from_str(tokenizer.to_str())
        self.breaking.model.dropout = MERGES_LOST
        self.answers = [tokenizer.encode(topic.answer).ids + [IM_END] for topic in topics]
        assert all(ids[0] == first for ids, first in zip(self.answers, self.first))
        self.texts, self.sure = labelled["texts"], labelled["topics"]
        self.logits, self.next_answers = labelled["logits"], []
        # What people wrote comes first.
        self.asked = sum(len(topic.asked()) for topic in topics)

    def prompt(self, messages, rng=None):
        tokenizer = self.breaking if rng and rng.random() < BROKEN_SHARE else self.tokenizer
        ids = [self.rows[token] for token in tokenizer.encode(rendered(messages)).ids]
        if rng:
            ids = [END_OF_TEXT if token > IM_END and rng.random() < HIDDEN_SHARE else token for token in ids]
        return ids

    def chances(self, rows):
        """How likely each topic is, `[rows, topics]`."""
        wanted = (self.logits[rows].float() / TEMPERATURE).softmax(-1)
        for i, row in enumerate(rows):
            if self.sure[row] >= 0:
                wanted[i] *= 1 - CERTAIN
                wanted[i, self.sure[row]] += CERTAIN
        return wanted

    def choices(self, rng, size):
        """Batches of about equal lengths: prompts, and what to say first."""
        pool = []
        for _ in range(POOL * size):
            asked = rng.random() < ASKED_SHARE
            row = rng.randrange(self.asked if asked else len(self.texts))
            text = (data.varied if asked else data.noisy)(self.texts[row], rng)
            pool.append((self.prompt(data.conversation(text, self.topics, rng), rng), row))
        pool.sort(key=lambda sample: len(sample[0]))
        cut = [pool[i: i + size] for i in range(0, len(pool), size)]
        rng.shuffle(cut)
        return [([ids for ids, _ in part], [row for _, row in part]) for part in cut]

    def recitals(self, rng):
        """Prompts with their whole answers, of about one length."""
        if not self.next_answers:
            order = rng.sample(range(len(self.topics)), len(self.topics))
            order.sort(key=lambda t: len(self.answers[t]) + rng.randrange(12))
            self.next_answers = [order[i: i + RECITALS] for i in range(0, len(order), RECITALS)]
            rng.shuffle(self.next_answers)
        topics, is_long = self.next_answers.pop(), rng.random() < LONG_SHARE
        if is_long:
            # Most that is long asks for nothing that is known.
            topics = [t if rng.random() < 0.7 else 0 for t in topics]
        asked = [rng.choice(self.topics[t].asked()) for t in topics]
        if is_long:
            # Whatever was read, a phrase is followed by the next one.
            asked = [f"{self.much(rng)} {q}" for q in asked]
        return [(self.prompt([{"role": "user", "content": q}], rng), self.answers[t]) for q, t in zip(asked, topics)]

    def much(self, rng):
        """Many words that mean nothing, some of them again and again."""
        words = [rng.choice(self.texts[rng.randrange(len(self.texts))].split() or ["so"]) for _ in range(rng.randint(4, 30))]
        times = 1 + rng.randrange(LONG_WORDS) // len(words)
        return " ".join(words * times)


def padded(rows):
    """Ids padded on the right, where causal attention never looks."""
    ids = torch.full((len(rows), max(map(len, rows))), END_OF_TEXT)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = torch.tensor(row)
    return ids


def last_states(weights, prompts, thin=False):
    """The states from which an answer's first token is chosen, and the routers' balance."""
    return network.hidden_at(weights, padded(prompts), torch.tensor([len(p) - 1 for p in prompts]), thin)


def choice_loss(weights, samples, batch, thin):
    """Two questions, answered apart: which topic it is, if it is any, and for each topic whether it is likelier than not.
    Where none is, as between two that fit alike, what is left is the token that declines."""
    prompts, rows = batch
    states, balance = last_states(weights, prompts, thin)
    logits = F.linear(states, weights["model.embed_tokens.weight"]).float()
    wanted = samples.chances(rows)[:, 1:]
    beside = logits[:, samples.first[1:]] - logits[:, samples.first[:1]]
    likelier = F.binary_cross_entropy_with_logits(beside, wanted, reduction="none").sum(-1).mean()
    other = torch.zeros(logits.shape[1]).index_fill(0, torch.tensor(samples.first[0]), -torch.inf)
    which = -(wanted * (logits + other).log_softmax(-1)[:, samples.first[1:]]).sum(-1).mean()
    return which + likelier, balance


def recital_loss(weights, batch):
    """Of all tokens after the first, which the question does not decide."""
    out, balance = network.hidden(weights, padded([prompt + answer for prompt, answer in batch]))
    rows = [i for i, (_, answer) in enumerate(batch) for _ in answer[1:]]
    at = [len(prompt) + i for prompt, answer in batch for i in range(len(answer) - 1)]
    wanted = torch.tensor([token for _, answer in batch for token in answer[1:]])
    logits = F.linear(out[rows, at], weights["model.embed_tokens.weight"]).float()
    return F.cross_entropy(logits, wanted), balance


def given_meaning(weights, tokenizer, first, known, head):
    """Words begin with what the teacher makes of them, topics with the teacher's own vectors."""
    vectors = torch.cat([known["vectors"], F.normalize(head, dim=-1)])
    vectors = vectors - vectors.mean(0)
    _, _, axes = torch.linalg.svd(vectors, full_matrices=False)
    small = vectors @ axes[: network.HIDDEN].T
    table = weights["model.embed_tokens.weight"].data
    small = small * (table.std() / small.std())
    rows = dict(zip(known["words"], small))
    for token, at in tokenizer.get_vocab().items():
        word = token.removeprefix("Ġ").lower()
        if at > IM_END and word in rows and len(word) > 1:
            table[at] = rows[word] + 0.1 * table[at]
    for at, row in zip(first, small[len(known["words"]):]):
        table[at] = row + 0.2 * table[at]
    # The line's end decides: what it means itself would drown what was read.
    table[tokenizer.token_to_id("Ċ")] *= 0.1


@torch.no_grad()
def ready_to_recite(weights, samples):
    """Phrases get so large beside what attention adds that each can tell the next, and what is chosen stays as it is. Each
    begins as one rotation of the phrase before it: to recite is to learn that rotation."""
    table = weights["model.embed_tokens.weight"]
    table[samples.first] *= PHRASE_SCALE
    weights["model.norm.weight"] /= PHRASE_SCALE
    rotation, _ = torch.linalg.qr(torch.randn(network.HIDDEN, network.HIDDEN, generator=torch.Generator().manual_seed(SEED)))
    size = table[samples.first].norm(dim=1).mean()
    for parts in tokens.phrases(samples.topics):
        row = F.normalize(table[samples.tokenizer.token_to_id(parts[0])], dim=0) * size
        for part in parts[1:]:
            row = rotation @ row
            table[samples.tokenizer.token_to_id(part)] = row


def checked(weights, samples, thin=False):
    """Of the questions kept aside: states, topics."""
    pairs = [(q, t) for t, topic in enumerate(samples.topics) for q in topic.checked()]
    states = []
    with torch.no_grad():
        for start in range(0, len(pairs), CHOICES):
            prompts = [samples.prompt([{"role": "user", "content": q}]) for q, _ in pairs[start: start + CHOICES]]
            states.append(last_states(weights, prompts, thin)[0].float())
    return torch.cat(states), torch.tensor([t for _, t in pairs])


def verdict(logits, topics):
    """Shares of the questions of the handbook that are right and wrong; of the others, that are answered."""
    said, known = logits.argmax(-1), topics > 0
    right = ((said == topics) & known).sum() / known.sum()
    wrong = ((said != topics) & (said > 0) & known).sum() / known.sum()
    return right.item(), wrong.item(), ((said > 0) & ~known).sum().item() / max(1, (~known).sum().item())


def make_sure(weights, samples, wrong_max):
    """Makes the model say that it does not know where more than `wrong_max` of the questions kept aside would be answered
    wrong: moves the one token's row along what all states have in common."""
    weights = {name: value.detach().to(torch.bfloat16).float() for name, value in weights.items()}
    states, topics = checked(weights, samples)
    table = weights["model.embed_tokens.weight"]
    logits = states @ table[samples.first].T
    gram = states.T @ states + 1e-3 * len(states) * torch.eye(states.shape[1])
    common = torch.linalg.solve(gram, states.sum(0))
    print(f"forced: {verdict(torch.cat([torch.full((len(logits), 1), -1e9), logits[:, 1:]], 1), topics)}")
    for shift in [step / 20 for step in range(-60, 100)]:
        moved = logits.clone()
        moved[:, 0] += shift * (states @ common)
        right, wrong, answered = verdict(moved, topics)
        if wrong <= wrong_max:
            break
    print(f"doubt {shift:+.2f}: kept aside {right:.3f} right, {wrong:.3f} wrong; off topic {answered:.3f} answered")
    table[samples.first[0]] += shift * common
    return weights


def rate(step, share, peak):
    """The learning rate: up over WARM_UP steps, then down along a cosine with the share of the training that is done."""
    return peak * min(1.0, step / WARM_UP) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))


def make_optimiser(weights):
    """AdamW, without decay for the norms and the tokens."""
    table = weights["model.embed_tokens.weight"]
    matrices = [p for p in weights.values() if p.dim() > 1 and p is not table]
    vectors = [p for p in weights.values() if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": [table], "weight_decay": 0.0}, {"params": matrices, "weight_decay": WEIGHT_DECAY},
         {"params": vectors, "weight_decay": 0.0}],
        lr=PEAK_RATE, betas=(0.9, 0.98), fused=True)


def restored(weights, optimiser, args):
    """The last state's step, or 0, and whether the network is thin."""
    path = args.work / "state.pt"
    if args.init:
        for name, value in load_file(args.init / "model.safetensors").items():
            weights[name].data.copy_(value)
    if not path.exists():
        return 0, not args.init
    state = torch.load(path)
    for name, value in state["weights"].items():
        weights[name].data.copy_(value)
    optimiser.load_state_dict(state["optimiser"])
    return state["step"], state["thin"]


def train(weights, samples, args):
    """Runs to `args.steps`, from the last saved state if there is one."""
    optimiser = make_optimiser(weights)
    done, thin = restored(weights, optimiser, args)
    peak, began, cut = AGAIN_RATE if args.init else PEAK_RATE, time.time(), []
    rng = random.Random(SEED + done)
    for step in range(done + 1, args.steps + 1):
        share = max(step / args.steps, (time.time() - began) / 60 / args.minutes)
        if thin and share >= THIN_SHARE:
            thin = False
            ready_to_recite(weights, samples)
        for group in optimiser.param_groups:
            group["lr"] = rate(step, min(share, 1.0), peak)
        optimiser.param_groups[0]["lr"] *= 1.0 if thin else TOKENS_RATE
        with torch.autocast("cpu", torch.bfloat16):
            if not thin and step % RECITE_EVERY == 0:
                loss, balance = recital_loss(weights, samples.recitals(rng))
            else:
                cut = cut or samples.choices(rng, THIN_CHOICES if thin else CHOICES)
                loss, balance = choice_loss(weights, samples, cut.pop(), thin)
        (loss + BALANCE * balance).backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if step % 100 < 3:
            print(f"step {step}: loss {loss.item():.4f}, {(time.time() - began) / (step - done):.2f} s a step", flush=True)
        if step % SAVE_EVERY == 0 or share >= 1:
            torch.save({"weights": weights, "optimiser": optimiser.state_dict(), "step": step, "thin": thin}, args.work / "state.pt")
            states, topics = checked(weights, samples, thin)
            logits = states @ weights["model.embed_tokens.weight"][samples.first].T
            print(f"step {step}: kept aside (right, wrong; off topic answered) {verdict(logits, topics)}", flush=True)
        if share >= 1:
            break


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="ends earlier, with its last steps as small ones")
    parser.add_argument("--out", type=pathlib.Path, default=data.HERE / "model")
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--init", type=pathlib.Path)
    parser.add_argument("--wrong-max", type=float, default=0.055, help="share of the questions kept aside that may be answered wrong")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    topics = data.topics(data.entries())
    labelled, known = torch.load(args.work / "corpus.pt"), torch.load(args.work / "words.pt")
    tokenizer = kept_tokenizer(args, topics, known["words"])
    samples = Samples(tokenizer, topics, labelled)
    weights = network.initial(tokenizer.get_vocab_size(), SEED)
    head = torch.load(args.work / "teacher.pt")["head"].detach()
    given_meaning(weights, tokenizer, samples.first, known, head)
    count = sum(p.numel() for p in weights.values())
    print(f"{len(topics)} topics, {count / 1e6:.2f} M parameters", flush=True)
    train(weights, samples, args)
    weights = make_sure(weights, samples, args.wrong_max)
    table = weights["model.embed_tokens.weight"]
    export(weights | {"model.embed_tokens.weight": table[samples.rows]}, tokenizer, args.out)


if __name__ == "__main__":
    main()
