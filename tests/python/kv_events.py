"""Reads a worker's KV events with nothing but vLLM's documented structures, msgspec and libzmq.

Usage: kv_events.py map|array EVENTS REPLAY BASE_URL. Exits non-zero, with a traceback, when an expectation fails.
"""

import json
import sys
import urllib.request

import msgspec
import zmq
from kv_event_reader import BLOCK_SIZE, END, ask, receive, structures

TOPIC = b"kv@test"


class State:
    """The resident blocks by their hash, as the events tell them."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple] = {}
        self.salts: set[str] = set()
        self.removals = 0
        self.longest = 0

    def apply(self, batch) -> None:
        assert batch.data_parallel_rank == 0 and batch.ts > 1.7e9, batch
        assert batch.events, "a batch without events"
        for event in batch.events:
            match type(event).__name__:
                case "BlockStored":
                    self.store(event)
                case "BlockRemoved":
                    assert (event.medium, event.group_idx) == ("GPU", 0), event
                    self.removals += len(event.block_hashes)
                    for block_hash in event.block_hashes:
                        del self.blocks[block_hash]
                case "AllBlocksCleared":
                    self.blocks.clear()

    def store(self, event) -> None:
        n = len(event.block_hashes)
        self.longest = max(self.longest, n)
        assert n >= 1 and event.block_size == BLOCK_SIZE and len(event.token_ids) == n * BLOCK_SIZE, event
        assert (event.medium, event.group_idx, event.lora_id, event.lora_name) == ("GPU", 0, None, None), event
        assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == ("full_attention", None), event
        assert event.extra_keys is not None and len(event.extra_keys) == n, event
        parent = event.parent_block_hash
        for i, (block_hash, keys) in enumerate(zip(event.block_hashes, event.extra_keys)):
            assert parent is None or parent in self.blocks, f"the parent {parent} is not there"
            assert block_hash not in self.blocks and 0 <= block_hash < 2**64, block_hash
            assert keys is None or (parent is None and len(keys) == 1), "only a first block has a salt"
            self.salts.update(keys or ())
            tokens = tuple(event.token_ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE])
            self.blocks[block_hash] = (parent, tokens, keys)
            parent = block_hash


def replies(context: zmq.Context, replay: str, request: bytes) -> list[tuple[int, bytes]]:
    """All replies to a request, up to the end mark."""
    found = []
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(replay)
        dealer.send_multipart([b"", request])
        while True:
            delimiter, topic, seq, payload = receive(dealer)
            assert delimiter == b"", delimiter
            if seq == END:
                assert (topic, payload) == (b"", b"")
                return found
            assert topic == TOPIC, topic
            found.append((int.from_bytes(seq, "big"), payload))


def main(form: str, events: str, replay: str, base_url: str) -> None:
    decoder = msgspec.msgpack.Decoder(structures(f"vllm-{form}"))
    with urllib.request.urlopen(f"{base_url}/v1/models", timeout=30) as response:
        model = json.load(response)["data"][0]["id"]
    context = zmq.Context()
    live = context.socket(zmq.SUB)
    live.connect(events)
    live.setsockopt(zmq.SUBSCRIBE, b"kv@")
    # A subscription takes a moment to arrive: ask until something is heard.
    n = 0
    while not live.poll(100):
        n += 1
        ask(base_url, model, [10 + n % 200] * 40)

    shared = [20 + i % 90 for i in range(100)]
    for i in range(24):
        ask(base_url, model, shared[: 20 + 3 * i] + [10 + i] * (40 + i))
    ask(base_url, model, shared, cache_salt="tenant")

    # Everything since the start, by number without a gap.
    whole = replies(context, replay, (0).to_bytes(8, "big"))
    assert [seq for seq, _ in whole] == list(range(len(whole))), [seq for seq, _ in whole]
    state = State()
    for _, payload in whole:
        state.apply(decoder.decode(payload))
    assert state.removals > 0 and state.salts == {"tenant"} and state.longest > 1, vars(state)

    # The live stream said the same, in the same bytes.
    heard = []
    while not heard or heard[-1][0] < len(whole) - 1:
        topic, seq, payload = receive(live)
        assert topic == TOPIC and len(seq) == 8
        heard.append((int.from_bytes(seq, "big"), payload))
    assert heard == whole[heard[0][0] :], "live and replayed differ"

    # A replay begins where it is asked to, and ends at once if there is nothing.
    middle = len(whole) // 2
    assert replies(context, replay, middle.to_bytes(8, "big")) == whole[middle:]
    assert replies(context, replay, len(whole).to_bytes(8, "big")) == []

    # A snapshot leads to the same state, whatever was known before, and says where to go on.
    restored = State()
    restored.blocks[1] = (None, (), None)
    for seq, payload in replies(context, replay, b"snapshot"):
        assert seq == len(whole), seq
        restored.apply(decoder.decode(payload))
    assert restored.blocks == state.blocks, "the snapshot is not the state"
    print(f"{len(whole)} batches, {len(heard)} heard live, {len(state.blocks)} blocks resident")


if __name__ == "__main__":
    main(*sys.argv[1:])
