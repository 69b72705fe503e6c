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

    def answered(self, answer):
        self.messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})

    @staticmethod
    def counted(usage):
        """Tokens of the prompt, and those found in a cache."""
        return usage["prompt_tokens"], (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0


class IdConversation:
    """The same, as a client of token ids has it."""

    PATH = "/inference/v1/generate"

    def __init__(self, chance, system):
        # Those who begin with the same words begin with the same ids.
        self.ids, self.chance, self.seen = [10 + ord(letter) for letter in system], chance, 0

    def next(self, words):
        self.ids += [self.chance.randrange(10, 250) for _ in range(3 * words)]
        return {"model": MODEL, "token_ids": self.ids, "sampling_params": {"max_tokens": 12, "temperature": 0, "ignore_eos": True}}

    def answered(self, answer):
        self.ids += answer["choices"][0]["token_ids"]

    counted = staticmethod(Conversation.counted)


SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}, "required": ["path"]}


class MessagesConversation:
    """An agent's, over Anthropic's API: it calls a tool in each turn, and is reminded of something by the system now and then."""

    PATH = "/v1/messages"

    def __init__(self, chance, system):
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cch={chance.randrange(1 << 30):x};"}
        self.system = [billing, {"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
        self.messages, self.chance, self.seen, self.call = [], chance, 0, None

    def next(self, words):
        blocks = [{"type": "text", "text": text(self.chance, words)}]
        if self.call:
            blocks.insert(0, {"type": "tool_result", "tool_use_id": self.call, "content": [{"type": "text", "text": text(self.chance, 8)}]})
        self.messages.append({"role": "user", "content": blocks})
        if self.chance.random() < 0.3:
            self.messages.append({"role": "system", "content": [{"type": "text", "text": f"{self.chance.randrange(999)} tokens left"}]})
        tools = [{"name": "read_file", "description": "Reads a file.", "input_schema": SCHEMA}]
        return {"model": MODEL, "system": self.system, "messages": self.messages, "tools": tools, "max_tokens": 12, "temperature": 0}

    def answered(self, answer):
        self.call = f"toolu_{self.chance.randrange(1 << 30):x}"
        thought = {"type": "thinking", "thinking": text(self.chance, 6), "signature": "c2ln"}
        used = {"type": "tool_use", "id": self.call, "name": "read_file", "input": {"path": text(self.chance, 2), "line": 3}}
        self.messages.append({"role": "assistant", "content": [thought, *answer["content"], used]})

    @staticmethod
    def counted(usage):
        found = usage.get("cache_read_input_tokens") or 0
        return usage["input_tokens"] + found + (usage.get("cache_creation_input_tokens") or 0), found


class ResponsesConversation:
    """An agent's, over OpenAI's Responses."""

    PATH = "/v1/responses"

    def __init__(self, chance, system):
        self.system, self.input, self.chance, self.seen, self.call = system, [], chance, 0, None

    def next(self, words):
        if self.call:
            self.input.append({"type": "function_call_output", "call_id": self.call, "output": text(self.chance, 8)})
        role = "developer" if self.chance.random() < 0.2 else "user"
        self.input.append({"type": "message", "role": role, "content": [{"type": "input_text", "text": text(self.chance, words)}]})
        tools = [{"type": "function", "name": "read_file", "description": "Reads a file.", "parameters": SCHEMA, "strict": False}]
        return {"model": MODEL, "instructions": self.system, "input": self.input, "tools": tools, "max_output_tokens": 12,
                "temperature": 0, "store": False}

    def answered(self, answer):
        self.call = f"call_{self.chance.randrange(1 << 30):x}"
        thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text(self.chance, 6)}]}
        arguments = json.dumps({"path": text(self.chance, 2), "line": 3})
        used = {"type": "function_call", "call_id": self.call, "name": "read_file", "arguments": arguments}
        self.input += [thought, *(item for item in answer["output"] if item["type"] == "message"), used]

    @staticmethod
    def counted(usage):
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


CONVERSATIONS = {"ids": IdConversation, "messages": MessagesConversation, "responses": ResponsesConversation}


def text(chance, words):
    return " ".join(chance.choice(WORDS) for _ in range(words))


def turn(gateway, conversation, words):
    """Goes on with a conversation: tokens of its prompt, and those that the engine found in its cache."""
    status, body = ask(gateway.port, "POST", conversation.PATH, conversation.next(words))
    if status != 200:
        sys.exit(f"{status}: {body}")
    answer = json.loads(body)
    conversation.seen, found = conversation.counted(answer["usage"])
    conversation.answered(answer)
    return conversation.seen, found


def converse(gateway, args, by):
    """Every request's prompt tokens, what was predicted and what was found, and whether its worker had none of the last turn."""
    chance = random.Random(args.seed)
    kind = CONVERSATIONS.get(by, Conversation)
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
    # The last choice is written beside its answer, perhaps after it.
    gateway.decision(len(rows) - 1)
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
    parse.add_argument("--by", default="events,text", help="what the gateway predicts from: events,text,ids; or by events, of agents over another API: messages,responses")
    parse.add_argument("--engines", type=int, default=2)
    parse.add_argument("--requests", type=int, default=200)
    parse.add_argument("--turns", type=int, default=6)
    parse.add_argument("--at-a-time", type=int, default=12, help="conversations that take turns")
    parse.add_argument("--system-words", type=int, default=200)
    parse.add_argument("--pause-ms", type=int, default=0, help="between an answer and the next request")
    args = parse.parse_args()
    # Small enough that prompts are forgotten all the time. A model with windows has blocks for each of its groups.
    args.blocks = {"full": 160, "agent": 160, "window": 300}
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
