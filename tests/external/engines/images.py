"""Pictures among the text of chats, of a model that sees: what the gateway predicts and prices beside what real engines find and count.

First pairs of requests, then conversations, with and without pictures, over more than the caches hold. See images.md."""

import base64
import json
import random
import struct
import sys
import time
import zlib

from fleet import BLOCK_TOKENS, MODEL, arguments, ask, running
from forms import CHAT, found_in
from predictions import text

BLOCKS = 200
# Text is cut elsewhere than tokens, one block more or less at either end; and how many tokens it has is an estimate, of which the gateway
# too takes a tenth for right.
SLACK, ESTIMATED_WITHIN = 2 * BLOCK_TOKENS, 0.1
# Sides in pixels; the model has a token for each 16 by 16 of them.
SIZES = [(96, 96), (160, 128), (320, 160), (320, 320)]
LARGE = SIZES[3]
# Answers that tell what text and pictures cost before the gateway's price of a prompt is judged.
TEACH = 20
# Conversations of text that go on with a picture.
GAINING = 20


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, seed, level=6):
    """Squares of random colours."""
    chance, rows = random.Random(seed), []
    for _ in range(0, height, 16):
        rows += [b"\0" + b"".join(chance.randbytes(3) * 16 for _ in range(0, width, 16))] * 16
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(b"".join(rows), level)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def picture(size, seed, level=6, **more):
    url = "data:image/png;base64," + base64.b64encode(png(*size, seed, level)).decode()
    return {"type": "image_url", "image_url": {"url": url, **more}}


def said(words):
    return {"type": "text", "text": words}


def chat(*parts, **more):
    return {"model": MODEL, "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4, "temperature": 0, **more}


def goes_on(body, *parts):
    turns = [{"role": "assistant", "content": "It is."}, {"role": "user", "content": list(parts)}]
    return {**body, "messages": body["messages"] + turns}


def pairs(chance):
    """Two requests each, and what is wanted of the second's prediction: that it is right, that nothing is there, or less or more than is
    right at most, where that is known to be so."""
    words, some = (lambda: said(text(chance, 120))), (lambda size=LARGE: picture(size, chance.random()))
    again = lambda *parts, **more: (chat(*parts, **more), chat(*parts, **more), "yes")

    def changed(change):
        """A text with two pictures, and what becomes of it."""
        parts = [words(), some(), words(), some(), words()]
        return chat(*parts), chat(*change(*parts)), "yes"

    icons = [some((32, 32)) for _ in range(8)]
    seed, a, b, c, d = chance.random(), words(), words(), words(), words()
    talk, one = chat(words(), some(), words()), some()
    return {
        "no picture, again": again(words(), words()),
        "a picture first, again": again(some(), words()),
        "in the middle, again": again(words(), some(), words()),
        "last, again": again(words(), some()),
        "512 by 512, again": again(words(), some((512, 512)), words()),
        "two, again": again(words(), some(), words(), some(), words()),
        "the same one twice, again": again(words(), one, words(), one, words()),
        "eight of 32 by 32, again": (chat(a, *icons, b), chat(a, *icons, b), "more"),
        "with a salt, again": again(words(), some(), words(), cache_salt="a"),
        "with a salt, then with another": (chat(a, one, b, cache_salt="a"), chat(a, one, b, cache_salt="b"), "nothing"),
        "another in the first one's place": changed(lambda a, one, b, two, c: (a, some(), b, two, c)),
        "another in the second one's place": changed(lambda a, one, b, two, c: (a, one, b, some(), c)),
        "they change places": changed(lambda a, one, b, two, c: (a, two, b, one, c)),
        "the first one moves behind its text": changed(lambda a, one, b, two, c: (a, b, one, two, c)),
        "the second one is left out": changed(lambda a, one, b, two, c: (a, one, b, c)),
        "the same in another text": (chat(a, one, d), chat(b, one, d), "nothing"),
        "a turn more, with a picture": (talk, goes_on(talk, some(), words()), "yes"),
        "a turn more, of text": (talk, goes_on(talk, words()), "yes"),
        "the same pixels, compressed otherwise": (chat(c, picture(LARGE, seed), d), chat(c, picture(LARGE, seed, 1), d), "yes"),
        "the same with a `detail`": (chat(d, picture(LARGE, seed), c), chat(d, picture(LARGE, seed, detail="low"), c), "less"),
    }


def asked(gateway, body, pause_s=0.0):
    """The gateway's choice for a request, and the tokens that the answer says it has and that were found."""
    nth = len(gateway.decided())
    status, answer = ask(gateway.port, "POST", CHAT, body)
    if status != 200:
        sys.exit(f"{status}: {answer[:500]}")
    time.sleep(pause_s)
    answer = json.loads(answer)
    return gateway.decision(nth), answer["usage"]["prompt_tokens"], found_in(answer), answer["choices"][0]["message"]["content"]


def teach(gateway, chance):
    """Texts and pictures of many sizes: how far the price of each is off, in percent."""
    off = []
    for nth in range(TEACH):
        parts = [said(text(chance, 120))] + ([picture(chance.choice(SIZES), chance.random())] if nth % 2 else [])
        choice, tokens, _, _ = asked(gateway, chat(*parts, said("what is it?")), 0.3)
        off.append(100 * (choice["prompt_tokens"] / tokens - 1))
    return off


def verdict(choice, found):
    predicted = choice["matched_tokens"]
    slack = max(SLACK, ESTIMATED_WITHIN * found) if choice["keyed_by"] == "text" else BLOCK_TOKENS
    if abs(predicted - found) <= slack:
        return "yes"
    return "more" if predicted > found else "less"


def ask_pairs(gateway, chance):
    holds = True
    for name, (first, second, wanted) in pairs(chance).items():
        (before, _, _, _), (choice, tokens, found, _) = (asked(gateway, body, 0.3) for body in (first, second))
        predicted, seen = choice["matched_tokens"], verdict(choice, found)
        if wanted == "nothing":
            right = max(predicted, found) <= SLACK
        else:
            right = seen in (wanted, "yes") and found > SLACK and choice["worker"] == before["worker"]
        shown = seen if right else f"**{seen}**, wanted {wanted}"
        print(f"| {name} | {choice['prompt_tokens']} and {tokens} | {predicted} and {found} | {shown} |", flush=True)
        holds &= right
    return holds


def gain_pictures(gateway, chance, by):
    """Conversations of text whose second turn has the first picture: by events none of the text is known to be there, and who names a user
    stays for that alone."""
    holds = True
    for named in ({}, {"user": "one"}):
        stayed = predicted = found = had = 0
        for _ in range(GAINING):
            talk = chat(said(text(chance, 300)), **named)
            before, tokens, _, _ = asked(gateway, talk, 0.3)
            choice, _, more, _ = asked(gateway, goes_on(talk, picture(LARGE, chance.random()), said("what is it?")), 0.3)
            stayed += choice["worker"] == before["worker"]
            predicted, found, had = predicted + choice["matched_tokens"], found + more, had + tokens
        print(f"| {by} | {'`user`' if named else '–'} | {stayed} of {GAINING} | {had} | {predicted} | {found} |", flush=True)
        holds &= predicted <= found + SLACK * GAINING and (stayed == GAINING or by == "events" and not named)
    return holds


class Talk:
    """A conversation that may have pictures. Those that begin alike have other pictures in the same places."""

    def __init__(self, chance, opening, pictures):
        self.chance, self.pictures, self.body, self.answer = chance, pictures, None, ""
        self.opening, self.seen, self.shows = opening, 0, False

    def parts(self):
        shown = [picture(self.chance.choice(SIZES), self.chance.randrange(40))] if self.chance.random() < self.pictures else []
        self.shows |= bool(shown)
        return [*shown, said(text(self.chance, self.chance.randint(10, 60)))]

    def next(self):
        if self.body is None:
            self.body = chat(*self.parts(), ignore_eos=True)
            self.body["messages"].insert(0, {"role": "system", "content": self.opening})
        else:
            self.body["messages"] += [{"role": "assistant", "content": self.answer}, {"role": "user", "content": self.parts()}]
        return self.body


def talk(gateway, args, shares):
    """Of every request, whether it shows a picture, its tokens as priced and as they are, and how many were predicted and found."""
    chance = random.Random(args.seed)
    openings, running_ones, rows = [text(chance, 150) for _ in range(4)], [], []
    while len(rows) < args.requests:
        if len(running_ones) < args.at_a_time:
            running_ones.append((Talk(chance, chance.choice(openings), chance.choice(shares)), args.turns))
        one, left = running_ones.pop(chance.randrange(len(running_ones)))
        choice, tokens, found, one.answer = asked(gateway, one.next())
        rows.append({"shows": one.shows, "priced": choice["prompt_tokens"], "tokens": tokens, "predicted": choice["matched_tokens"],
                     "found": found, "seen": verdict(choice, found), "lost": found + SLACK < one.seen})
        one.seen = tokens
        if left > 1:
            running_ones.append((one, left - 1))
    return rows


def row(name, some, counted):
    verdicts = [one["seen"] for one in some]
    within, total = verdicts.count("yes"), lambda key: sum(one[key] for one in some)
    print(f"| {name} | {len(some)} | {total('lost')} | {within} | {verdicts.count('more')} | {total('predicted')} | {total('found')} "
          f"| {counted} | {total('priced') / total('tokens'):.3f} |", flush=True)
    return within, total


def judge(gateway, args, by):
    chance = random.Random(args.seed)
    off = teach(gateway, chance)
    told = ", ".join(f"{one:+.0f}" for one in off)
    print(f"\n{by}: how far the prices of the first {TEACH} prompts are off, in percent: {told}")
    print("\n| two requests | priced and counted | predicted and found | as found |\n|---|---:|---:|---|")
    holds = ask_pairs(gateway, chance)
    print("\n| by | named | stayed | tokens that they had | predicted | found |\n|---|---|---:|---:|---:|---:|", flush=True)
    holds &= gain_pictures(gateway, chance, by)
    print(f"\n| conversations, by {by} | requests | last turn forgotten | as found | more | predicted | reported "
          "| the engines' own count | priced to counted |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    for name, shares in (("all with pictures", [0.7]), ("one in three with pictures", [0.7, 0.0, 0.0])):
        start = [engine.counted() for engine in gateway.engines]
        rows = talk(gateway, args, shares)
        hit = sum(engine.counted()[1] - old[1] for engine, old in zip(gateway.engines, start))
        holds &= hit == sum(one["found"] for one in rows)
        shown, text_alone = ([one for one in rows if one["shows"] == shows] for shows in (True, False))
        within, total = row(f"{name}: prompts with one", shown, f"{hit:.0f} of both")
        # A price that is off makes a little of a difference; another picture's tokens, or a whole prompt's, would make much.
        holds &= within >= 0.7 * len(shown) and total("predicted") <= 1.05 * total("found")
        holds &= 0.95 <= total("priced") / total("tokens") <= 1.05
        within, _ = row(f"{name}: prompts without", text_alone, "")
        holds &= by == "text" or within >= 0.99 * len(text_alone)
    return holds


def main():
    parse = arguments(__doc__)
    parse.add_argument("--by", default="events,text", help="what the gateway predicts from: events,text")
    parse.add_argument("--requests", type=int, default=200)
    parse.add_argument("--turns", type=int, default=4)
    parse.add_argument("--at-a-time", type=int, default=14, help="conversations that take turns")
    args = parse.parse_args()
    holds = True
    for by in args.by.split(","):
        with running(args, "sees", 2, BLOCKS, by) as gateway:
            holds &= judge(gateway, args, by)
    sys.exit(not holds)


if __name__ == "__main__":
    main()
