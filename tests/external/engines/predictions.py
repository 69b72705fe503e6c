"""Whether the gateway knows what real engines will find in their caches: conversations over more text than the caches hold, one request
at a time, and for each what the gateway predicted beside what the engine reports. See README.md.
"""

import json
import random
import sys
import time

from fleet import BLOCK_TOKENS, MODEL, arguments, ask, running, series

WORDS = "worker remembers prefix request token block cache route answer window layer queue".split()


class Conversation:
    """Messages that grow by a turn at a time."""

    PATH = "/v1/chat/completions"

    def __init__(self, chance, system):
        self.messages = [{"role": "system", "content": system}]
        self.chance = chance
        # Tokens of its last prompt.
        self.seen = 0

    def next(self, words):
        self.messages.append({"role": "user", "content": text(self.chance, words)})
        return {"model": MODEL, "messages": self.messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}

    def answered(self, choice):
        self.messages.append({"role": "assistant", "content": choice["message"]["content"] or ""})


class IdConversation:
    """The same, as a client of token ids has it."""

    PATH = "/inference/v1/generate"

    def __init__(self, chance, system):
        # Those who begin with the same words begin with the same ids.
        self.ids, self.chance, self.seen = [10 + ord(letter) for letter in system], chance, 0

    def next(self, words):
        self.ids += [self.chance.randrange(10, 250) for _ in range(3 * words)]
        return {"model": MODEL, "token_ids": self.ids, "sampling_params": {"max_tokens": 12, "temperature": 0, "ignore_eos": True}}

    def answered(self, choice):
        self.ids += choice["token_ids"]


def text(chance, words):
    return " ".join(chance.choice(WORDS) for _ in range(words))


def turn(gateway, conversation, words):
    """Goes on with a conversation: tokens of its prompt, and those that the engine found in its cache."""
    status, body = ask(gateway.port, "POST", conversation.PATH, conversation.next(words))
    if status != 200:
        sys.exit(f"{status}: {body}")
    answer = json.loads(body)
    usage = answer["usage"]
    conversation.seen = usage["prompt_tokens"]
    conversation.answered(answer["choices"][0])
    return usage["prompt_tokens"], (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def converse(gateway, args, by):
    """Every request's prompt tokens, what was predicted and what was found, and whether its worker had none of the last turn."""
    chance = random.Random(args.seed)
    kind = IdConversation if by == "ids" else Conversation
    systems = [text(chance, args.system_words) for _ in range(4)]
    open_ones, rows = [], []
    while len(rows) < args.requests:
        if len(open_ones) < args.at_a_time:
            open_ones.append((kind(chance, chance.choice(systems)), args.turns))
        nth = chance.randrange(len(open_ones))
        conversation, left = open_ones.pop(nth)
        before = conversation.seen
        tokens, found = turn(gateway, conversation, chance.randint(10, 60))
        time.sleep(args.pause_ms / 1e3)
        rows.append((tokens, found, found + 2 * BLOCK_TOKENS < before))
        if left > 1:
            open_ones.append((conversation, left - 1))
    decided = gateway.decided()
    if len(decided) != len(rows):
        sys.exit(f"{len(rows)} answers and {len(decided)} choices: was the gateway asked by somebody else?")
    return [(tokens, choice["matched_tokens"], found, lost) for (tokens, found, lost), choice in zip(rows, decided)]


def judge(kind, by, args):
    with running(args, kind, args.engines, args.blocks[kind], by) as gateway:
        before = [engine.counted() for engine in gateway.engines]
        rows = converse(gateway, args, by)
        after = [engine.counted() for engine in gateway.engines]
        causes = series(gateway.admin, "keyway_prediction_misses_total")
    queried, hit = (sum(b[i] - a[i] for a, b in zip(before, after)) for i in (0, 1))
    # Text is cut elsewhere than tokens: one block more or less at either end.
    slack = 2 * BLOCK_TOKENS if by == "text" else BLOCK_TOKENS
    missed = [(nth, *row) for nth, row in enumerate(rows) if abs(row[1] - row[2]) > slack]
    exact = sum(predicted == found for _, predicted, found, _ in rows)
    predicted, found = (sum(row[i] for row in rows) for i in (1, 2))
    return {"kind": kind, "by": by, "requests": len(rows), "right": len(rows) - len(missed), "exact": exact, "predicted": predicted,
            "found": found, "lost": sum(row[3] for row in rows), "queried": queried, "hit": hit, "missed": missed, "causes": causes}


def main():
    parse = arguments(__doc__)
    parse.add_argument("--kinds", default="full,window", help="models, as in tiny_model.py")
    parse.add_argument("--by", default="events,text", help="what the gateway predicts from: events,text,ids")
    parse.add_argument("--engines", type=int, default=2)
    parse.add_argument("--requests", type=int, default=200)
    parse.add_argument("--turns", type=int, default=6)
    parse.add_argument("--at-a-time", type=int, default=12, help="conversations that take turns")
    parse.add_argument("--system-words", type=int, default=200)
    parse.add_argument("--pause-ms", type=int, default=0, help="between an answer and the next request")
    args = parse.parse_args()
    # Small enough that prompts are forgotten all the time. A model with windows has blocks for each of its groups.
    args.blocks = {"full": 160, "window": 300}
    print("| model | by | requests | last turn forgotten | within a block | exactly | predicted tokens | reported | the engines' own count "
          "| of all tokens |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    failed = False
    for kind in args.kinds.split(","):
        for by in args.by.split(","):
            row = judge(kind, by, args)
            share = row["hit"] / row["queried"]
            print("| {kind} | {by} | {requests} | {lost} | {right} | {exact} | {predicted} | {found} | {hit:.0f} | {share:.1%} |".format(
                share=share, **row), flush=True)
            for missed in row["missed"]:
                print("request {} of {} tokens: predicted {}, found {}".format(*missed[:4]), file=sys.stderr)
            for labels, count in row["causes"].items():
                print(f"{labels}: {count:.0f}", file=sys.stderr)
            failed |= row["hit"] != row["found"] or (by != "text" and row["right"] < 0.99 * row["requests"])
    sys.exit(failed)


if __name__ == "__main__":
    main()
