"""Reads the mock's KV events with nothing but the engines' documented structures, msgspec and libzmq.

Usage: mock_kv_events.py vllm-map|vllm-array|sglang-map|sglang-array EVENTS REPLAY BASE_URL. Exits non-zero, with a
traceback, when an expectation fails.
"""

import sys

import msgspec
import zmq
from kv_event_reader import BLOCK_SIZE, END, ask, receive, structures


def replies(context: zmq.Context, replay: str, start: int, with_topic: bool) -> list[tuple[int, bytes]]:
    """All replies from number `start` on, up to the end mark."""
    found = []
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(replay)
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            frames = receive(dealer)
            assert len(frames) == (4 if with_topic else 3) and frames[0] == b"", frames
            if frames[-2] == END:
                assert frames[-1] == b""
                return found
            found.append((int.from_bytes(frames[-2], "big"), frames[-1]))


def check(batches: list, signed: bool) -> None:
    """Every block is stored after its parent and removed while it is there; equal blocks may be there twice."""
    copies: dict[int, int] = {}
    removals = 0
    for batch in batches:
        assert batch.data_parallel_rank == 0 and batch.ts > 1.7e9 and batch.events, batch
        for event in batch.events:
            low, high = (-(2**63), 2**63) if signed else (0, 2**64)
            assert all(low <= block < high for block in event.block_hashes), event
            assert event.medium == "GPU", event
            if type(event).__name__ == "BlockStored":
                n = len(event.block_hashes)
                assert n >= 1 and event.block_size == BLOCK_SIZE and len(event.token_ids) == n * BLOCK_SIZE, event
                assert event.parent_block_hash is None or copies.get(event.parent_block_hash), event
                for block in event.block_hashes:
                    copies[block] = copies.get(block, 0) + 1
            else:
                removals += len(event.block_hashes)
                for block in event.block_hashes:
                    copies[block] -= 1
                    assert copies[block] >= 0, event
    assert removals > 0 and any(copies.values()), copies


def main(form: str, events: str, replay: str, base_url: str) -> None:
    decoder = msgspec.msgpack.Decoder(structures(form))
    with_topic = form == "vllm-map"
    context = zmq.Context()
    live = context.socket(zmq.SUB)
    live.connect(events)
    live.setsockopt(zmq.SUBSCRIBE, b"")
    # A subscription takes a moment to arrive: ask until something is heard.
    n = 0
    while not live.poll(100):
        n += 1
        ask(base_url, "mock", [10 + n % 200] * 40)

    shared = [20 + i % 90 for i in range(100)]
    for i in range(40):
        ask(base_url, "mock", shared[: 20 + 2 * i] + [10 + i] * (40 + i))
    ask(base_url, "mock", shared, cache_salt="tenant")

    # Everything since the start, by number without a gap.
    whole = replies(context, replay, 0, with_topic)
    assert [seq for seq, _ in whole] == list(range(len(whole))), [seq for seq, _ in whole]
    batches = [decoder.decode(payload) for _, payload in whole]
    check(batches, signed=form.startswith("sglang"))
    last = batches[-1].events[-1]
    salted = {
        "vllm": lambda: last.extra_keys[0] == ("tenant",),
        "sglang": lambda: "tenant" in (getattr(last, "cache_salt", None) or last.metadata["cache_salt"]),
    }
    assert salted[form.split("-")[0]](), last

    # The live stream said the same, in the same bytes.
    heard = []
    while not heard or heard[-1][0] < len(whole) - 1:
        topic, seq, payload = receive(live)
        assert topic == b"" and len(seq) == 8
        heard.append((int.from_bytes(seq, "big"), payload))
    assert heard == whole[heard[0][0] :], "live and replayed differ"

    middle = len(whole) // 2
    assert replies(context, replay, middle, with_topic) == whole[middle:]
    assert replies(context, replay, len(whole), with_topic) == []
    print(f"{form}: {len(whole)} batches, {len(heard)} heard live")


if __name__ == "__main__":
    main(*sys.argv[1:])
