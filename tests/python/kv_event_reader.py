"""What readers of KV events share: the engines' documented structures for msgspec, and small words to a server.

The structures are those of vllm/distributed/kv_events.py and of sglang/srt/disaggregation/kv_events.py; msgspec refuses
what does not fit their types.
"""

import json
import urllib.request

import msgspec
import zmq

BLOCK_SIZE = 16
END = b"\xff" * 8
PATIENCE_MS = 30_000


def structures(form: str) -> type:
    """The batch type in the words of one engine."""
    engine, shape = form.split("-")

    class Event(msgspec.Struct, array_like=shape == "array", omit_defaults=True, tag=True, forbid_unknown_fields=True):
        pass

    if engine == "vllm":

        class BlockStored(Event):
            block_hashes: list[int]
            parent_block_hash: int | None
            token_ids: list[int]
            block_size: int
            lora_id: int | None
            medium: str | None
            lora_name: str | None
            extra_keys: list[tuple[str, ...] | None] | None = None
            group_idx: int | None = None
            kv_cache_spec_kind: str | None = None
            kv_cache_spec_sliding_window: int | None = None

        class BlockRemoved(Event):
            block_hashes: list[int]
            medium: str | None
            group_idx: int | None = None

    elif shape == "map":

        class BlockStored(Event):
            block_hashes: list[int]
            parent_block_hash: int | None
            token_ids: list[int]
            block_size: int
            lora_id: int | None
            medium: str | None = None
            cache_salt: str | None = None
            session_id: str | None = None

        class BlockRemoved(Event):
            block_hashes: list[int]
            medium: str | None = None

    else:

        class BlockStored(Event):
            block_hashes: list[int]
            parent_block_hash: int | None
            token_ids: list[int]
            block_size: int
            lora_id: int | None
            medium: str | None = None
            metadata: dict[str, str] | None = None

        class BlockRemoved(Event):
            block_hashes: list[int]
            medium: str | None = None

    class AllBlocksCleared(Event):
        pass

    class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
        ts: float
        events: list[BlockStored | BlockRemoved | AllBlocksCleared]
        data_parallel_rank: int | None = None

    return Batch


def ask(base_url: str, model: str, prompt: list[int], **more) -> None:
    """Completes a prompt of token ids."""
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "ignore_eos": True, **more}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{base_url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.status == 200


def receive(socket: zmq.Socket) -> list[bytes]:
    assert socket.poll(PATIENCE_MS), "nothing came"
    return socket.recv_multipart()
