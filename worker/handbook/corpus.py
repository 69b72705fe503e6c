"""Questions that nobody wrote: crosses, frames and synonyms of the handbook's. The teacher says what each asks for."""

import random
import re

import torch

import data

# What a word is replaced by: those of its nearest that are at least so near.
NEAREST, NEAR = 12, 0.45
# Words that a cross keeps of each parent.
HALF = 0.55


def tokens(text):
    """Lower-case words, with what belongs to a flag or a path."""
    return re.findall(r"[a-z0-9_\-/.:]*[a-z0-9_]", text.lower())


def words(topics):
    """The words of all questions and answers, the common ones first."""
    counts = {}
    for topic in topics:
        for text in (*topic.asked(), topic.answer):
            for word in tokens(text):
                counts[word] = counts.get(word, 0) + 1
    for row in data.SYNONYMS:
        for word in " ".join(row).lower().split():
            counts.setdefault(word, 1)
    return sorted(counts, key=lambda word: (-counts[word], word))


def neighbours(words, vectors):
    """For each word, words of a like meaning."""
    vectors = vectors - vectors.mean(0)
    vectors = vectors / vectors.norm(dim=1, keepdim=True)
    found = {}
    for start in range(0, len(words), 512):
        near, at = (vectors[start: start + 512] @ vectors.T).topk(NEAREST + 1, dim=1)
        for row, (shares, ids) in enumerate(zip(near.tolist(), at.tolist())):
            word = words[start + row]
            found[word] = [words[i] for share, i in zip(shares, ids) if share > NEAR and words[i] != word]
    return found


def exchanged(text, nearest, rng, share):
    """With some words replaced by near ones."""
    out = []
    for word in text.split():
        bare = word.strip("?!.,;:'\"").lower()
        near = nearest.get(bare)
        out.append(word.lower().replace(bare, rng.choice(near)) if near and rng.random() < share else word)
    return " ".join(out)


def crossed(one, other, rng):
    """Words of two questions."""
    return " ".join(word for word in [*one.split(), *other.split()] if rng.random() < HALF) or one


def framed(one, other, rng):
    """One question's frame with a rare word of the other."""
    place, rare = one.split(), max(other.split(), key=len)
    place[rng.randrange(len(place))] = rare
    return " ".join(place)


def joined(one, other, rng):
    """The beginning of one and the end of the other."""
    one, other = one.split(), other.split()
    return " ".join(one[: rng.randint(1, len(one))] + other[rng.randrange(len(other)):])


def made(topics, nearest, count, seed):
    """`count` texts, with the topic that a text surely has, or -1."""
    rng = random.Random(seed)
    asked = [(q, i) for i, topic in enumerate(topics) for q in topic.asked()]
    common = list(nearest)
    texts = [(q, i) for q, i in asked]
    while len(texts) < count:
        (one, topic), (other, _) = rng.choice(asked), rng.choice(asked)
        again = rng.choice(topics[topic].asked())
        kind = rng.random()
        if kind < 0.28:
            text, sure = exchanged(one, nearest, rng, rng.choice([0.2, 0.4])), -1
        elif kind < 0.48:
            text, sure = exchanged(crossed(one, again, rng), nearest, rng, 0.15), -1
        elif kind < 0.62:
            text, sure = data.varied(one, rng), topic
        elif kind < 0.74:
            text, sure = framed(one, other, rng), -1
        elif kind < 0.84:
            text, sure = crossed(one, other, rng), -1
        elif kind < 0.92:
            text, sure = joined(one, other, rng), -1
        elif kind < 0.96:
            text, sure = " ".join(rng.choice(common[:1500]) for _ in range(rng.randint(1, 6))), -1
        else:
            text, sure = data.without_words(data.without_words(one, rng), rng), -1
        texts.append((text, sure))
    return texts
