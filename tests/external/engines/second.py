"""A second kind of engine behind the gateway, SGLang: whether its answers come through as it gives them, streamed and whole,
errors among them; and how much of their prompts conversations find cached by each way of choosing. See second.md."""

import http.client
import json
import random
import re
import sys
import time

from ends import Table, slow_start
from fleet import BLOCK_TOKENS, Gateway, arguments, ask, new_engine, tiny_model
from forms import CHAT, chat, completion, forms
from predictions import converse, text

BLOCKS = 160
# What differs from answer to answer: names, and SGLang's times of a request.
OWN = re.compile(r"id|created|created_at|.*_(time|ts|latency|throughput|wait)")
# Where an error quotes the request, what the gateway asked beside it.
ASKED = "'stream_options': {'include_usage': True}, "


def more_forms(words):
    """Beside those of forms.py: options of streams, structured answers, SGLang's own path, and what it refuses."""
    of = lambda what: {"type": "object", "properties": {"at": what}}
    tool = {"type": "function", "function": {"name": "look", "parameters": of({"type": "string"})}}
    strict = {**of({"enum": ["here", "there"]}), "required": ["at"], "additionalProperties": False}
    schema = {"type": "json_schema", "json_schema": {"name": "at", "schema": strict}}
    native = {"model": "tiny", "text": words(), "sampling_params": {"max_new_tokens": 9, "temperature": 0}}
    return {
        "usage in the end": chat(words(), stream_options={"include_usage": True}),
        "usage in each chunk": chat(words(), stream_options={"include_usage": True, "continuous_usage_stats": True}),
        "a tool that must be called": chat(words(), tools=[tool], tool_choice="required", max_tokens=60),
        "a tool that may be called": chat(words(), tools=[tool]),
        "a schema": chat(words(), max_tokens=60, response_format=schema),
        "`regex`": completion(words(), regex="(ab)+c", max_tokens=9),
        "`stop`": completion(words(), stop=["e", "o"], max_tokens=40),
        "`logprobs` of a completion": completion(words(), logprobs=2),
        "120 tokens": chat(words(), max_tokens=120, ignore_eos=True),
        "`/generate`": ("/generate", native),
        "too long": chat(" ".join(words() for _ in range(20))),
        "a bad `temperature`": chat(words(), temperature=-1),
        "a role that there is not": chat("", messages=[{"role": "nobody", "content": words()}]),
        "no messages": (CHAT, {"model": "tiny"}),
        "a prompt of a wrong type": completion({"a": 1}),
        "`max_tokens` of a wrong type": completion(words(), max_tokens="many"),
    }


def alike(value):
    """Without what differs from answer to answer."""
    if isinstance(value, dict):
        return {key: alike(inner) for key, inner in value.items() if not OWN.fullmatch(key)}
    if isinstance(value, str):
        return value.replace(ASKED, "")
    return [alike(inner) for inner in value] if isinstance(value, list) else value


def joined(events):
    """A stream's text, however it is cut: strings of the same place in each choice put together, anything else as it was last."""
    def merge(key, a, b):
        if isinstance(a, dict) and isinstance(b, dict):
            return {key: merge(key, a.get(key), b.get(key)) for key in {**a, **b}}
        if key in ("content", "text", "arguments", "reasoning_content") and isinstance(a, str) and isinstance(b, str):
            return a + b
        if key == "tool_calls" and isinstance(b, list):
            calls = {call["index"]: call for call in a or []}
            for call in b:
                calls[call["index"]] = merge("call", calls.get(call["index"]), call)
            return list(calls.values())
        if isinstance(a, list) and isinstance(b, list):
            return a + b
        return a if b is None else b

    whole = {}
    for event in events:
        for choice in event.pop("choices", None) or []:
            place = ("choice", choice["index"])
            whole[place] = merge("choice", whole.get(place), choice)
        whole["rest"] = {**whole.get("rest", {}), **event}
    return whole


def answer(port, path, body):
    """Its status, what kind of content it is, and what it says."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    got = connection.getresponse()
    kind, said = got.getheader("content-type", "").split(";")[0], got.read().decode()
    connection.close()
    if kind != "text/event-stream":
        return got.status, kind, alike(json.loads(said)) if kind == "application/json" else said
    lines = [line.removeprefix("data: ") for line in said.split("\n") if line.startswith("data: ")]
    named = [line for line in said.split("\n") if line.startswith("event: ")]
    events = [alike(json.loads(line)) for line in lines if line != "[DONE]"]
    whole = joined(events) if events and "choices" in events[0] else events[-1:]
    return got.status, kind, (whole, named, lines[-1:] == ["[DONE]"])


def same(table, gateway, chance, streamed):
    """Each form asked of the engine, twice of each so that both have it cached, and then of the gateway."""
    every = {**forms(lambda: text(chance, 40)), **more_forms(lambda: text(chance, 40))}
    differ, statuses = [], {}
    for name, (path, body) in every.items():
        body = {**body, "temperature": min(body.get("temperature", 0), 0), "seed": 1} if path != "/generate" else body
        if streamed:
            body = {**body, "stream": True}
        elif "stream_options" in body:
            continue
        direct = [answer(engine.port, path, body) for _ in range(2) for engine in gateway.engines][-1]
        through = answer(gateway.port, path, body)
        statuses[direct[0]] = statuses.get(direct[0], 0) + 1
        if direct != through:
            differ.append(name)
            print(f"{name}, {streamed=}:\n  {direct}\n  {through}", file=sys.stderr)
    count = sum(statuses.values())
    seen = ", ".join(f"{count} of status {status}" for status, count in sorted(statuses.items()))
    table.row(f"{count} forms of request, {'streamed' if streamed else 'whole'}", "what the engine says directly",
              f"{seen}; {'all equal' if not differ else 'not equal: ' + ', '.join(differ)}", not differ)


def paths(table, gateway):
    engine, differ = gateway.engines[0], []
    asked = {"/tokenize": {"prompt": "worker remembers"}, "/detokenize": {"tokens": [70, 71]},
             "/v1/embeddings": {"input": "worker"}}
    for path, body in asked.items():
        body = {"model": "tiny", **body}
        if answer(engine.port, path, body) != answer(gateway.port, path, body):
            differ.append(path)
    names = lambda port: [one["id"] for one in json.loads(ask(port, "GET", "/v1/models")[1])["data"]]
    differ += ["/v1/models"] if names(engine.port) != names(gateway.port) else []
    table.row("`/tokenize`, `/detokenize`, `/v1/embeddings`, the names of `/v1/models`", "what the engine says directly",
              "all equal" if not differ else f"not equal: {', '.join(differ)}", not differ)


def shares(args, model, engines):
    """Conversations under eviction, by each way of choosing, from empty caches: what answers report and the engines count."""
    print("\n| chosen by | requests | last turn forgotten | within a block | exactly | prompt tokens | predicted | reported "
          "| the engines' own count | of all tokens |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    told, truly = {}, True
    for name, by, config in (("text", "text", ""), ("events", "events", ""), ("round robin", "text", 'policy = "round-robin"\n')):
        for engine in engines:
            engine.forget()
        gateway = Gateway(args, args.scratch, model, engines, by, f"shares-{name.replace(' ', '-')}", config).start()
        before = [engine.counted() for engine in engines]
        try:
            rows = converse(gateway, args, by)
        finally:
            gateway.process.stop()
        time.sleep(1)
        queried, hit = (sum(engine.counted()[i] - was[i] for engine, was in zip(engines, before)) for i in (0, 1))
        tokens, predicted, found, lost = (sum(row[i] for row in rows) for i in range(4))
        # Text is cut elsewhere than tokens: one block more or less at either end.
        near = [sum(abs(row[1] - row[2]) <= slack for row in rows) for slack in (BLOCK_TOKENS * (2 if by == "text" else 1), 0)]
        told[name] = found / tokens
        truly &= (queried, hit) == (tokens, found) and (by == "text" or near[0] >= 0.99 * len(rows))
        cells = (name, len(rows), lost, *near, tokens, predicted, found, f"{hit:.0f}", f"{found / tokens:.1%}")
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    return truly and min(told["text"], told["events"]) > told["round robin"]


def main():
    parse = arguments(__doc__)
    parse.add_argument("--requests", type=int, default=200)
    parse.add_argument("--turns", type=int, default=6)
    parse.add_argument("--at-a-time", type=int, default=12, help="conversations that take turns")
    parse.add_argument("--system-words", type=int, default=200)
    parse.add_argument("--pause-ms", type=int, default=0, help="between an answer and the next request")
    args = parse.parse_args()
    chance, table, model = random.Random(args.seed), Table(), tiny_model(args, "varied")
    engines = [new_engine(args, args.scratch, model, nth, BLOCKS) for nth in range(2)]
    gateway = Gateway(args, args.scratch, model, engines, "text")
    holds = True
    try:
        slow_start(table, gateway, engines)
        for streamed in (False, True):
            same(table, gateway, chance, streamed)
        paths(table, gateway)
        gateway.process.stop()
        holds = shares(args, model, engines)
    finally:
        for one in [*engines, gateway]:
            if one.process:
                one.process.stop()
    sys.exit(not holds or bool(table.failed))


if __name__ == "__main__":
    main()
