"""The handbook's entries, and the many ways in which people ask.

Nothing here sees the held-out questions except `held_out`, which only an evaluation reads.
"""

import pathlib
import random
import tomllib
from dataclasses import dataclass

HERE = pathlib.Path(__file__).parent

GREETINGS = ["hi, ", "hello, ", "hey, ", "hi! ", "Hello. ", "please: ", "quick question: ", "question: ", "ok, ", "and "]
LEADS = ["tell me: ", "can you tell me ", "could you explain ", "I want to know: ", "I would like to know ", "do you know ",
         "please tell me ", "I am wondering, ", "in keyway, ", "with keyway, ", "about keyway: "]
TAILS = [" please", ", please?", " thanks", " in keyway?", " with keyway?", " in Keyway", "??", "!", " exactly?", " here?", ""]
SYSTEM = ["You are a helpful assistant.", "You are Keyway's assistant.", "Answer briefly.", "You are a helpful AI.",
          "Be concise.", "You help operators.", "You are an expert in inference servers. Answer in one sentence."]

# Words that people use for each other. A question keeps its meaning when a word is replaced by one of its row.
SYNONYMS = [row.split("|") for row in """
show|display|print|list|view
change|set|configure|adjust|modify|alter
start|run|launch|begin|start up
stop|end|quit|shut down
worker|backend|inference server|engine
workers|backends|inference servers|engines
gateway|proxy|router|keyway
option|flag|switch|setting|parameter
options|flags|switches|settings|parameters
find|see|look up|locate|get
explain|describe|tell me about|clarify
what does|what is the meaning of|explain what
what is|what's|tell me what is|define|describe
how do I|how can I|how to|how could I|what is the way to|how would I|in what way can I
where is|where do I find|where can I find|in which place is
which|what
limit|bound|maximum|cap
many|lots of|numerous
error|failure|fault
request|call|query
requests|calls|queries
client|caller|user|application
clients|callers|users|applications
machine|computer|host|server
file|document
folder|directory
tell|say|mean|indicate
use|utilise|employ|apply
need|require|want
work|function|behave
happens|occurs|takes place
choose|select|pick
chosen|selected|picked
memory|RAM
metric|series|measurement|counter
metrics|series|measurements
supported|possible|allowed|available
default|standard|normal
measure|benchmark|test
compare|contrast
fast|quick|speedy
big|large|huge
long|lengthy
token|word
answer|response|reply|output
prompt|input
cached|stored|kept
dies|crashes|fails|is killed
""".strip().splitlines()]
REPLACEMENTS = {word: [other for other in row if other != word] for row in SYNONYMS for word in row}


# Of a list of training questions those at these places, again after each STRIDE, are not trained on: they set how sure the
# model has to be. They are among the first, which are asked plainly.
CHECKED, STRIDE = (4, 8), 28


@dataclass(frozen=True)
class Entry:
    """One question of the handbook, other ways to ask it, and its answer."""

    question: str
    training: tuple
    held_out: tuple
    answer: str

    def checked(self):
        """Training questions that are kept aside."""
        return tuple(q for i, q in enumerate(self.training) if i % STRIDE in CHECKED)

    def asked(self):
        """The questions to train on."""
        kept = (q for i, q in enumerate(self.training) if i % STRIDE not in CHECKED)
        return (self.question, *kept)


@dataclass(frozen=True)
class Topic:
    """What has one answer: an entry, or all that are declined."""

    entries: tuple
    answer: str

    def asked(self):
        return tuple(q for entry in self.entries for q in entry.asked())

    def checked(self):
        return tuple(q for entry in self.entries for q in entry.checked())

    def held_out(self):
        return tuple(q for entry in self.entries for q in entry.held_out)


def entries():
    """Every entry, in the order of the files' names."""
    found = []
    for path in sorted((HERE / "questions").glob("*.toml")):
        for raw in tomllib.loads(path.read_text())["entry"]:
            found.append(Entry(raw["question"], tuple(raw["training"]), tuple(raw["held_out"]), raw["answer"]))
    return found


def topics(everything):
    """Entries by their answers. The first topic is the one that says that it does not know."""
    found = {}
    for entry in everything:
        found.setdefault(entry.answer, []).append(entry)
    known = sorted(found, key=lambda answer: len(found[answer]) == 1)
    return [Topic(tuple(found[answer]), answer) for answer in known]


def replaced(text, rng):
    """With one expression replaced by another of its row, if it has any."""
    padded = f" {text} "
    lower = padded.lower()
    known = [word for word in REPLACEMENTS if f" {word} " in lower]
    if not known:
        return text
    word = rng.choice(known)
    at = lower.index(f" {word} ")
    return (padded[: at + 1] + rng.choice(REPLACEMENTS[word]) + padded[at + 1 + len(word):]).strip()


def without_words(text, rng):
    """With a few words left out, never the longest one."""
    words = text.split()
    longest = max(words, key=len)
    kept = [word for word in words if word is longest or rng.random() > 0.2]
    return " ".join(kept)


def moved_words(text, rng):
    """With its words in another order: what is asked is mostly in the words."""
    words = text.split()
    at = rng.randrange(len(words))
    return " ".join(words[at:] + words[:at])


def mistyped(text, rng):
    """With a letter lost, doubled or swapped with its neighbour."""
    if len(text) < 6:
        return text
    i = rng.randrange(1, len(text) - 2)
    return rng.choice([text[:i] + text[i + 1:], text[:i] + text[i] + text[i:],
                       text[:i] + text[i + 1] + text[i] + text[i + 2:]])


def varied(text, rng):
    """The question as somebody else might ask it."""
    for change, share in ((replaced, 0.5), (replaced, 0.3), (without_words, 0.3), (moved_words, 0.08)):
        if rng.random() < share:
            text = change(text, rng)
    return noisy(text, rng)


def noisy(text, rng):
    """The question as somebody else might type it: what is asked stays."""
    if rng.random() < 0.12:
        text = mistyped(text, rng)
    if rng.random() < 0.3:
        text = text.rstrip("?.!") + rng.choice(TAILS)
    elif rng.random() < 0.3:
        text = text.rstrip("?.!")
    if rng.random() < 0.15:
        text = rng.choice(LEADS) + text[:1].lower() + text[1:]
    if rng.random() < 0.1:
        text = rng.choice(GREETINGS) + text
    case = rng.random()
    if case < 0.3:
        text = text.lower()
    elif case < 0.4:
        text = text[:1].upper() + text[1:]
    elif case < 0.42:
        text = text.upper()
    return text or "?"


def conversation(question, topics, rng):
    """Messages that end with a question: alone, after a system prompt, or after another question."""
    messages = [{"role": "user", "content": question}]
    kind = rng.random()
    if kind < 0.03:
        earlier = rng.choice(topics)
        messages = [{"role": "user", "content": rng.choice(earlier.asked())},
                    {"role": "assistant", "content": earlier.answer}, *messages]
    elif kind < 0.10:
        messages = [{"role": "system", "content": rng.choice(SYSTEM)}, *messages]
    return messages
