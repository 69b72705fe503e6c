"""The tokenizer: byte-level BPE of what people ask, and a token for each phrase of an answer."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import data
from export import IM_END, SPECIAL

# Tokens of the BPE, and of how many words it is shown each alone.
VOCAB, WORDS = 6600, 5304
# Words at which an answer's first token ends, at least.
BEGINNING_MIN = 5
# Words of a further token of an answer, and at least so many of its last one.
PHRASE, PHRASE_MIN = 4, 2


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


def make(topics, words):
    """Of `words` the topics' own come first, common ones of English behind them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    more = data.GREETINGS + data.LEADS + data.TAILS + data.SYSTEM + ["user\n", "assistant\n", "system\n"] * 50
    asked = [q for topic in topics for q in topic.asked()]
    common = [f"a {word}" for word in words[:WORDS]] * 2
    answers = [topic.answer for topic in topics] * 2
    tokenizer.train_from_iterator([q.lower() for q in asked] * 3 + asked * 2 + answers + common + more, trainer)
    parts = [part for cut in phrases(topics) for part in cut]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in parts])
    return tokenizer


def shared_rows(tokenizer, topics):
    """For each token the one whose row it has: a word means the same with a capital, in capitals, or first in a line.

    Training knows only these; `spread` gives the others their rows, so that the tokenizer need not change what it reads."""
    own = {*SPECIAL, *(part for cut in phrases(topics) for part in cut)}
    rows, found = list(range(tokenizer.get_vocab_size())), {}
    for token, at in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1]):
        word = token.lstrip("Ġ").lower()
        if at > IM_END and token not in own and word.isascii() and len(word) > 1:
            rows[at] = found.setdefault(word, at)
    return rows
