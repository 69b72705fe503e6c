"""Trains the built-in model on the handbook and writes it as a Hugging Face directory. See README.md beside it.

    python train.py --work DIR [--steps N] [--minutes N] [--out DIR] [--threads N] [--init DIR]

--work has what `teacher.py` wrote. Seeded; interrupted, it goes on from the last state there. With --init it begins with
the weights and the tokenizer of such a directory, at a tenth of the learning rate: enough for answers that changed.
"""

import argparse
import itertools
import math
import pathlib
import random
import time

import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F

import data
import network
from export import END_OF_TEXT, IM_END, SPECIAL, export, rendered

SEED = 20261129
VOCAB = 5120
# Questions of a step that teaches to choose, while the network is thin and later; answers of each RECITE_EVERY-th
# later step, which teaches to recite.
THIN_CHOICES, CHOICES, RECITALS, RECITE_EVERY = 320, 112, 32, 4
PEAK_RATE, AGAIN_RATE = 2.5e-3, 3e-4
WARM_UP = 100
WEIGHT_DECAY = 0.05
# Share in the loss of how unevenly the experts are used.
BALANCE = 0.01
# Of the tokens of a question, so many are hidden, so that no single one decides.
HIDDEN_SHARE = 0.1
# A topic is worth saying where it is likelier by this than that nothing fits.
DOUBT = 0.35
# The teacher's logits are divided by this, and what is certain counts so much beside it.
TEMPERATURE, CERTAIN = 0.7, 0.7
# Share of the training in which a thin network learns to choose, for a fraction of the time.
THIN_SHARE = 0.38
# Once it is not thin, tokens change at this share of the rate.
TOKENS_RATE = 0.1
# Words at which an answer's first token ends, at least.
BEGINNING_MIN = 5
# Words of a further token of an answer, and at least so many of its last one.
PHRASE, PHRASE_MIN = 4, 2
POOL = 16
SAVE_EVERY = 250


def beginnings(topics):
    """How each answer begins, so that it is no other's: the first words are one token, which decides everything."""
    found = []
    for topic in topics:
        words = topic.answer.split(" ")
        for count in range(BEGINNING_MIN, len(words) + 1):
            text = " ".join(words[:count])
            if sum(other.answer.startswith(text) for other in topics) == 1:
                break
        found.append(text)
    return found


def phrases(topics):
    """Each answer cut into phrases, its beginning first. A phrase is in one answer alone, so that it tells what follows."""
    answers, taken, cut = [topic.answer for topic in topics], set(), []
    for first, answer in zip(beginnings(topics), answers):
        parts, rest = [first], answer[len(first):].split(" ")[1:]
        while rest:
            count = PHRASE
            while count < len(rest) and (" " + " ".join(rest[:count]) in taken or len(rest) - count < PHRASE_MIN):
                count += 1
            part, rest = " " + " ".join(rest[:count]), rest[count:]
            if part in taken:
                part = parts.pop() + part
            parts.append(part)
            taken.add(part)
        cut.append(parts)
    return cut


def make_tokenizer(topics, texts, words):
    """Byte-level BPE over what people ask, and a token for each phrase of an answer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    first = beginnings(topics)
    further = [part for parts in phrases(topics) for part in parts[1:]]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(first), special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    more = data.GREETINGS + data.LEADS + data.TAILS + data.SYSTEM + ["user\n", "assistant\n", "system\n"] * 50
    answers = [topic.answer for topic in topics] * 8
    asked = [q for topic in topics for q in topic.asked()]
    common = [f"a {word}" for word in words] * 3
    tokenizer.train_from_iterator(asked * 2 + [q.lower() for q in asked] * 2 + texts[::8] + answers + common + more, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in first + further])
    return tokenizer


def kept_tokenizer(args, topics, texts, words):
    """The one that training in `args.work`, or of `args.init`, began with."""
    if args.init:
        return Tokenizer.from_file(str(args.init / "tokenizer.json"))
    path = args.work / "tokenizer.json"
    if not path.exists():
        make_tokenizer(topics, texts, words).save(str(path))
    return Tokenizer.from_file(str(path))


class Samples:
    """Questions with the chances of each topic, and answers, as ids."""

    def __init__(self, tokenizer, topics, labelled):
        self.tokenizer, self.topics = tokenizer, topics
        self.first = [tokenizer.token_to_id(text) for text in beginnings(topics)]
        if None in self.first:
            raise SystemExit("an answer's beginning is no token of this tokenizer: train from the start")
        self.answers = [tokenizer.encode(topic.answer).ids + [IM_END] for topic in topics]
        assert all(ids[0] == first for ids, first in zip(self.answers, self.first))
        self.texts, self.sure = labelled["texts"], labelled["topics"]
        self.logits, self.next_answers = labelled["logits"], []

    def prompt(self, messages, rng=None):
        ids = self.tokenizer.encode(rendered(messages)).ids
        if rng:
            ids = [END_OF_TEXT if token > IM_END and rng.random() < HIDDEN_SHARE else token for token in ids]
        return ids

    def chances(self, rows):
        """What to say to each text, `[rows, topics]`: the first topic takes the doubt."""
        wanted = (self.logits[rows].float() / TEMPERATURE).softmax(-1)
        for i, row in enumerate(rows):
            if self.sure[row] >= 0:
                wanted[i] *= 1 - CERTAIN
                wanted[i, self.sure[row]] += CERTAIN
        wanted[:, 0] += DOUBT
        return wanted / (1 + DOUBT)

    def choices(self, rng, size):
        """Batches of about equal lengths: prompts, and what to say first."""
        pool = []
        for _ in range(POOL * size):
            row = rng.randrange(len(self.texts))
            pool.append((self.prompt(data.conversation(data.noisy(self.texts[row], rng), self.topics, rng), rng), row))
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
        topics = self.next_answers.pop()
        asked = [rng.choice(self.topics[t].asked()) for t in topics]
        return [(self.prompt([{"role": "user", "content": q}], rng), self.answers[t]) for q, t in zip(asked, topics)]


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
    prompts, rows = batch
    states, balance = last_states(weights, prompts, thin)
    chances = F.linear(states, weights["model.embed_tokens.weight"]).float().log_softmax(-1)
    wanted = samples.chances(rows)
    return -(wanted * chances[:, samples.first]).sum(-1).mean(), balance


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


def chained(weights, tokenizer, topics):
    """Each phrase of an answer begins as one rotation of the phrase before it: to recite is to learn that rotation."""
    table = weights["model.embed_tokens.weight"].data
    rotation, _ = torch.linalg.qr(torch.randn(network.HIDDEN, network.HIDDEN, generator=torch.Generator().manual_seed(SEED)))
    for parts in phrases(topics):
        row = F.normalize(table[tokenizer.token_to_id(parts[0])], dim=0) * table.norm(dim=1).mean()
        for part in parts[1:]:
            row = rotation @ row
            table[tokenizer.token_to_id(part)] = row


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
    """The last state's step, or 0."""
    path = args.work / "state.pt"
    if args.init:
        for name, value in load_file(args.init / "model.safetensors").items():
            weights[name].data.copy_(value)
    if not path.exists():
        return 0
    state = torch.load(path)
    for name, value in state["weights"].items():
        weights[name].data.copy_(value)
    optimiser.load_state_dict(state["optimiser"])
    return state["step"]


def train(weights, samples, args):
    """Runs to `args.steps`, from the last saved state if there is one."""
    optimiser = make_optimiser(weights)
    done = restored(weights, optimiser, args)
    peak, began, cut = AGAIN_RATE if args.init else PEAK_RATE, time.time(), []
    rng = random.Random(SEED + done)
    for step in range(done + 1, args.steps + 1):
        share = max(step / args.steps, (time.time() - began) / 60 / args.minutes)
        thin = share < THIN_SHARE and not args.init
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
            torch.save({"weights": weights, "optimiser": optimiser.state_dict(), "step": step}, args.work / "state.pt")
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
    parser.add_argument("--wrong-max", type=float, default=0.08, help="share of the questions kept aside that may be answered wrong")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    topics = data.topics(data.entries())
    labelled, known = torch.load(args.work / "corpus.pt"), torch.load(args.work / "words.pt")
    tokenizer = kept_tokenizer(args, topics, labelled["texts"], known["words"])
    samples = Samples(tokenizer, topics, labelled)
    weights = network.initial(tokenizer.get_vocab_size(), SEED)
    head = torch.load(args.work / "teacher.pt")["head"].detach()
    given_meaning(weights, tokenizer, samples.first, known, head)
    chained(weights, tokenizer, topics)
    count = sum(p.numel() for p in weights.values())
    print(f"{len(topics)} topics, {count / 1e6:.2f} M parameters", flush=True)
    train(weights, samples, args)
    export(make_sure(weights, samples, args.wrong_max), tokenizer, args.out)


if __name__ == "__main__":
    main()
