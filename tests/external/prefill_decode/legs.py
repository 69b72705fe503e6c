"""Whether requests whose prompt one real engine computes and another answers come out as from one engine, and where the KV came from,
by the engines' own counters. See README.md."""

import http.client
import json
import pathlib
import random
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "engines"))
from fleet import BLOCK_TOKENS, MODEL, Engine, Gateway, arguments, ask, free_port, series, tiny_model  # noqa: E402
from predictions import text  # noqa: E402

BLOCKS = 512
# In bf16 two words may be as likely as each other, and then one engine alone says now the one, now the other.
EXACT = ["--dtype", "float32"]
CALLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
LEASE_S = 30
NIXL = ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"})]


class Part(Engine):
    """An engine that gives KV to others or takes it."""

    def __init__(self, args, model, nth, role):
        super().__init__(args, args.scratch, model, nth, BLOCKS, [*EXACT, *CALLS, *NIXL])
        self.role = role
        self.env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "UCX_TLS": "tcp,self,sm",
                    "UCX_NET_DEVICES": "lo"}

    def worker(self):
        return f"{super().worker()};role={self.role}"

    def fetched(self):
        """Prompt tokens that it took from others so far, and those that it found itself."""
        total = lambda name: sum(series(self.port, name).values())
        return total("vllm:external_prefix_cache_hits_total"), total("vllm:prefix_cache_hits_total")

    def held(self):
        """The share of its blocks that requests have."""
        return sum(series(self.port, "vllm:kv_cache_usage_perc").values())


COMPLETIONS, CHAT, MESSAGES, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {
    "type": "object", "properties": {"word": {"enum": ["cache", "prefix", "window"]}}, "required": ["word"], "additionalProperties": False}}}


def streamed(port, path, body):
    """The text of a stream with the arguments of its calls, and its usage."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer, said, usage = connection.getresponse(), "", None
    if answer.status != 200:
        sys.exit(f"{answer.status}: {answer.read()!r}")
    for line in answer:
        if line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            for told in (chunk, chunk.get("message") or {}, chunk.get("response") or {}):
                usage = told.get("usage") or usage
            for choice in chunk.get("choices", ()):
                said += choice.get("text") or words_of(choice.get("delta", {}))
            if chunk.get("type") == "content_block_delta":
                said += chunk["delta"].get("text", "")
            elif chunk.get("type") == "response.output_text.delta":
                said += chunk["delta"]
    connection.close()
    return said, usage


def words_of(message):
    """What is said in a message or a part of one."""
    calls = (call["function"].get("arguments") or "" for call in message.get("tool_calls") or [])
    return (message.get("content") or "") + "".join(calls)


def answered(port, path, body):
    if body.get("stream"):
        return streamed(port, path, body)
    status, answer = ask(port, "POST", path, body)
    if status != 200:
        sys.exit(f"{status}: {answer}")
    answer = json.loads(answer)
    if path == MESSAGES:
        return "".join(block.get("text", "") for block in answer["content"]), answer["usage"]
    if path == RESPONSES:
        return "".join(part.get("text", "") for item in answer["output"] for part in item.get("content") or ()), answer["usage"]
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else words_of(choice["message"]), answer["usage"]


def prompt_of(usage):
    """Tokens of the prompt, and how many of them were found cached, as any API says it."""
    beside, created = (usage.get(f"cache_{what}_input_tokens") or 0 for what in ("read", "creation"))
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return (usage.get("prompt_tokens") or usage["input_tokens"]) + beside + created, beside + (details.get("cached_tokens") or 0)


class Talk:
    """A conversation: chats, with a tool or without one, Messages, Responses, or completions that grow; whole or as streams."""

    def __init__(self, chance, nth):
        self.path = (COMPLETIONS, CHAT, CHAT, MESSAGES, RESPONSES)[nth % 5]
        self.chance, self.stream, self.has_tool = chance, nth % 2 == 0, nth % 5 == 2
        # Its next answer is a call of the tool.
        self.calls = False
        self.messages, self.prompt = [{"role": "system", "content": text(chance, 140)}], text(chance, 140)

    def next(self):
        words = text(self.chance, self.chance.randint(10, 60))
        common = {"model": MODEL, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": self.stream}
        if self.stream and self.path in (CHAT, COMPLETIONS):
            common |= {"stream_options": {"include_usage": True}}
        if self.has_tool:
            self.calls = not self.calls
            common["tools"] = [TOOL]
            # Whole arguments, however long, and nothing behind them.
            common |= {"tool_choice": {"type": "function", "function": {"name": "look_up"}}, "max_tokens": 64, "ignore_eos": False} if self.calls else \
                {"tool_choice": "none"}
        if self.path == COMPLETIONS:
            self.prompt += " " + words
            return self.path, {**common, "prompt": self.prompt}
        self.messages.append({"role": "user", "content": words})
        if self.path == CHAT:
            return self.path, {**common, "messages": self.messages}
        system, turns = self.messages[0]["content"], self.messages[1:]
        if self.path == MESSAGES:
            return self.path, {**common, "system": system, "messages": turns}
        del common["max_tokens"]
        return self.path, {**common, "instructions": system, "input": turns, "max_output_tokens": 12, "store": False}

    def said(self, words):
        if self.calls:
            call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": words}}
            self.messages += [{"role": "assistant", "content": None, "tool_calls": [call]},
                              {"role": "tool", "tool_call_id": "c1", "content": text(self.chance, 20)}]
            return
        self.messages.append({"role": "assistant", "content": words})
        self.prompt += words


def done(gateway):
    return sum(count for labels, count in series(gateway.admin, "keyway_prefill_legs_total").items() if "done" in labels)


def run(args, gateway, alone, decode):
    chance, told = random.Random(args.seed), {"equal": 0, "within a block": 0, "fetched": 0, "found": 0, "prompt": 0, "cached told": 0}
    talk = None
    for nth in range(args.requests):
        if nth % args.turns == 0:
            talk = Talk(chance, nth // args.turns)
        path, body = talk.next()
        before, legs = [engine.fetched() for engine in decode], done(gateway)
        said, usage = answered(gateway.port, path, body)
        # An engine counts with its next step.
        after = [engine.fetched() for engine in decode]
        fetched, found = (sum(b[which] - a[which] for a, b in zip(before, after)) for which in (0, 1))
        alone_said, alone_usage = answered(alone.port, path, body)
        prompt, cached = prompt_of(usage)
        told["equal"] += said == alone_said and prompt == prompt_of(alone_usage)[0]
        # Without a first leg the engine that answers computes what it does not find.
        missing = 0 if done(gateway) > legs else args.from_tokens
        whole = -BLOCK_TOKENS <= prompt - fetched - found <= missing + BLOCK_TOKENS
        told["within a block"] += whole
        if said != alone_said or prompt != prompt_of(alone_usage)[0] or not whole:
            print(f"request {nth}: {usage} alone {alone_usage} fetched {fetched} found {found}, {said!r} alone {alone_said!r}", file=sys.stderr)
        for key, more in (("fetched", fetched), ("found", found), ("prompt", prompt), ("cached told", cached)):
            told[key] += int(more)
        talk.said(said)
    return told


def nothing_is_left(engines):
    """Whether no engine has a request or holds blocks for one, once leases are over."""
    until = time.monotonic() + LEASE_S + 15
    while any(engine.busy() or engine.held() for engine in engines):
        if time.monotonic() > until:
            return False
        time.sleep(1)
    return True


def main():
    parse = arguments(__doc__)
    parse.add_argument("--requests", type=int, default=200)
    parse.add_argument("--turns", type=int, default=5)
    parse.add_argument("--prefill", type=int, default=1)
    parse.add_argument("--decode", type=int, default=1)
    parse.add_argument("--from-tokens", type=int, default=1, help="uncached tokens from which on a prompt is computed elsewhere")
    args = parse.parse_args()
    model = tiny_model(args, "varied")
    alone = Engine(args, args.scratch, model, "alone", BLOCKS, [*EXACT, *CALLS])
    prefill = [Part(args, model, f"prefill-{nth}", "prefill") for nth in range(args.prefill)]
    decode = [Part(args, model, f"decode-{nth}", "decode") for nth in range(args.decode)]
    engines, gateway = [alone, *prefill, *decode], None
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.await_ready()
        gateway = Gateway(args, args.scratch, model, [*prefill, *decode], "events",
                          config=f'[routing]\nsplit = "always"\nprefill_from_tokens = {args.from_tokens}\n').start()
        told = run(args, gateway, alone, decode)
        legs = {labels: int(count) for labels, count in series(gateway.admin, "keyway_prefill_legs_total").items()}
        clean = nothing_is_left([*prefill, *decode])
    finally:
        for one in [*engines, gateway]:
            if one and one.process:
                one.process.stop()
    print(f"{args.requests} requests: {told['equal']} with the text and the prompt tokens of one engine alone, "
          f"{told['within a block']} whose prompt was fetched or found within a block")
    print(f"{told['prompt']} prompt tokens: {told['fetched']} fetched, {told['found']} found by the engine that answers; "
          f"{told['cached told']} told to clients as cached")
    print(f"first legs: {legs}; nothing left at the engines: {clean}")
    sys.exit(not (told["equal"] == told["within a block"] == args.requests and clean))


if __name__ == "__main__":
    main()
