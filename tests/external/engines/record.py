"""Records what a real vLLM says of its cache, and what its answers say that they found there, for tests that replay it without an engine
(gateway/core/src/kv_feed/tests/recorded.rs). Run with the Python that has vLLM.

A line each, in order: `batch` and a batch of events as it came, in hexadecimal; `prompt`, the tokens of a prompt, how many of them were found
cached, and the engine's name of its last whole block: what was found is what the batches before it tell.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import time

import msgspec
import zmq

from fleet import BLOCK_TOKENS, Engine, ask
from predictions import Conversation, text

QUIET_MS = 300


class Events:
    """The engine's batches, and which block is whose successor by them."""

    def __init__(self, port):
        self.socket = zmq.Context().socket(zmq.SUB)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.depth = {}
        time.sleep(1)

    def until_quiet(self):
        """Those that came, and the names of the blocks of whole prefixes that they stored."""
        batches, stored = [], []
        while self.socket.poll(QUIET_MS):
            payload = self.socket.recv_multipart()[2]
            batches.append(payload)
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == "BlockStored" and event["kv_cache_spec_kind"] == "full_attention":
                    before = event["parent_block_hash"]
                    for name in event["block_hashes"]:
                        self.depth[name] = self.depth.get(before, 0) + 1
                        before = name
                        stored.append(name)
        return batches, stored


def main():
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("kind", choices=("full", "window"))
    parse.add_argument("out", type=pathlib.Path)
    parse.add_argument("--scratch", type=pathlib.Path, required=True)
    parse.add_argument("--prompts", type=int, default=36)
    parse.add_argument("--seed", type=int, default=1)
    args = parse.parse_args()
    args.vllm = pathlib.Path(sys.prefix)
    args.scratch.mkdir(exist_ok=True)
    model = args.scratch / args.kind
    if not model.exists():
        subprocess.run([sys.executable, pathlib.Path(__file__).parent / "tiny_model.py", args.kind, model], check=True)
    # As few as it starts with: prompts are forgotten all the time.
    blocks, flags = {"full": (40, ()), "window": (110, ())}[args.kind]
    flags = ("--max-model-len", "1024", "--max-num-batched-tokens", "256", *flags)
    engine = Engine(args, args.scratch, model, 0, blocks, flags).start()
    lines, chance = [], random.Random(args.seed)
    try:
        engine.await_ready()
        events = Events(engine.events)
        systems = [text(chance, 40) for _ in range(3)]
        open_ones = []
        while sum(line.startswith("prompt") for line in lines) < args.prompts:
            if len(open_ones) < 5:
                open_ones.append((Conversation(chance, chance.choice(systems)), 5))
            conversation, left = open_ones.pop(chance.randrange(len(open_ones)))
            status, body = ask(engine.port, "POST", "/v1/chat/completions", conversation.next(chance.randint(8, 30)))
            assert status == 200, body
            answer = json.loads(body)
            tokens, found = answer["usage"]["prompt_tokens"], (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            batches, stored = events.until_quiet()
            last = [name for name in stored if events.depth[name] == tokens // BLOCK_TOKENS]
            # Of one that was found whole the engine says nothing.
            if last:
                lines.append(f"prompt {tokens} {found} {last[0]}")
            lines += [f"batch {payload.hex()}" for payload in batches]
            conversation.answered(answer)
            if left > 1:
                open_ones.append((conversation, left - 1))
    finally:
        engine.process.stop()
    args.out.write_text("\n".join(lines) + "\n")


main()
