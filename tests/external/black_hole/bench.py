#!/usr/bin/env python3
"""What a worker that refuses everything at once costs its fleet's clients: scripted workers of which one refuses while its health is
fine, a real gateway, requests at even chance in time, and what the clients saw. Prints a table in Markdown. Standard library only."""

import argparse
import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile

STATUSES = {"503": 503, "429": 429, "401": 401, "404": 404}
REFUSERS = [*STATUSES, "error event", "abort event"]
LOADS = ["new prompts", "shared prefix", "8 sessions"]
MODEL = "m1"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keyway", required=True, help="the gateway's binary")
    parser.add_argument("--rate", type=float, default=60, help="requests a second")
    parser.add_argument("--seconds", type=float, default=5, help="of each run")
    parser.add_argument("--service-ms", type=float, default=100, help="time that a good worker takes")
    parser.add_argument("--workers", type=int, nargs="+", default=[3, 8], help="sizes of the fleet")
    parser.add_argument("--policies", nargs="+", default=["prefix", "round-robin"])
    parser.add_argument("--refusers", nargs="+", default=REFUSERS, choices=REFUSERS)
    parser.add_argument("--loads", nargs="+", default=LOADS, choices=LOADS)
    parser.add_argument("--refusing", type=int, default=1, help="workers that refuse")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def answer(status, body, kind="application/json"):
    head = f"HTTP/1.1 {status} Scripted\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def event(data):
    text = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
    return f"{len(text):x}\r\n".encode() + text + b"\r\n"


def chunk(delta, reason=None):
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


async def read_message(reader):
    """Head and body of a message with a length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    length = re.search(r"(?im)^content-length: *(\d+)", head)
    return head, await reader.readexactly(int(length[1]) if length else 0)


class Worker:
    """Answers after a while, or refuses at once."""

    def __init__(self, service, refuses=None):
        self.service, self.refuses, self.asked = service, refuses, 0

    async def start(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0, limit=1 << 22)
        self.url = "http://127.0.0.1:%d" % self.server.sockets[0].getsockname()[1]

    async def serve(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head, body = await read_message(reader)
                path = head.split(" ", 2)[1]
                if path == "/health":
                    writer.write(answer(200, b"{}"))
                elif path == "/v1/models":
                    listed = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
                    writer.write(answer(200, json.dumps(listed).encode()))
                elif path != "/v1/chat/completions":
                    writer.write(answer(404, b"{}"))
                else:
                    self.asked += 1
                    await self.chat(json.loads(body), writer)
                await writer.drain()
        writer.close()

    async def chat(self, request, writer):
        stream = request.get("stream")
        if self.refuses in STATUSES:
            error = {"error": {"message": "refused", "type": "server_error"}}
            writer.write(answer(STATUSES[self.refuses], json.dumps(error).encode()))
        elif self.refuses == "error event":
            error = {"error": {"message": "the engine is in trouble", "type": "internal", "code": 500}}
            writer.write(STREAM + event(error) + event("[DONE]") + END)
        elif self.refuses == "abort event":
            writer.write(STREAM + event(chunk({}, "abort")) + event("[DONE]") + END)
        elif not stream:
            await asyncio.sleep(self.service)
            message = {"role": "assistant", "content": "one two three"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            whole = {"id": "c", "object": "chat.completion", "model": MODEL, "choices": [choice]}
            writer.write(answer(200, json.dumps(whole).encode()))
        else:
            await asyncio.sleep(self.service * 0.8)
            writer.write(STREAM)
            for word in ["one", " two", " three"]:
                writer.write(event(chunk({"content": word})))
                await writer.drain()
                await asyncio.sleep(self.service * 0.2 / 3)
            writer.write(event(chunk({}, "stop")) + event("[DONE]") + END)


@contextlib.asynccontextmanager
async def gateway(keyway, policy, workers):
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        command = [keyway, "--policy", policy, "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
        for worker in workers:
            command += ["--worker", worker.url]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield await ready(process, log.name, len(workers))
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait)


async def ready(process, log, workers):
    """Where clients connect, once all workers are ready."""
    for _ in range(600):
        with open(log, encoding="utf-8") as lines:
            text = re.sub(r"\x1b\[[0-9;]*m", "", lines.read())
        listens = re.search(r"listening on http://127\.0\.0\.1:(\d+)", text)
        if listens and text.count("ready=true") >= workers:
            return int(listens[1])
        if process.poll() is not None:
            sys.exit(f"the gateway ended:\n{text}")
        await asyncio.sleep(0.05)
    sys.exit(f"the gateway is not ready:\n{text}")


def prompts(load, rng):
    """Headers and text of request after request."""
    prefix = " ".join(f"shared{i}" for i in range(1_500))
    past = [f"session {i} begins" for i in range(8)]
    for i in range(1_000_000):
        new = f"question {i} of {rng.random()} " + f"word{i} " * 150
        if load == "new prompts":
            yield "", new
        elif load == "shared prefix":
            yield "", f"{prefix} {new}"
        else:
            past[i % 8] += f" and then {new}"
            yield f"x-session-id: session-{i % 8}\r\n", past[i % 8][-20_000:]


async def ask(port, headers, text, stream):
    """Whether the client has a whole answer."""
    body = {"model": MODEL, "stream": stream, "messages": [{"role": "user", "content": text}]}
    body = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        whole = await asyncio.wait_for(reader.read(), 30)
        good = whole.startswith(b"HTTP/1.1 200") and b"three" in whole and b'"error"' not in whole
        return good and b'"abort"' not in whole and (not stream or b"[DONE]" in whole)
    except (ConnectionError, asyncio.TimeoutError):
        return False
    finally:
        writer.close()


async def run(options, size, refuses, load, policy):
    rng = random.Random(options.seed)
    service = options.service_ms / 1e3
    workers = [Worker(service, refuses if i < options.refusing else None) for i in range(size)]
    for worker in workers:
        await worker.start()
    async with gateway(options.keyway, policy, workers) as port:
        asks, loop = [], asyncio.get_running_loop()
        began, at = loop.time(), 0.0
        for i, (headers, text) in enumerate(prompts(load, rng)):
            at += rng.expovariate(options.rate)
            if at > options.seconds:
                break
            await asyncio.sleep(max(0.0, began + at - loop.time()))
            stream = refuses not in STATUSES or i % 2 == 0
            asks.append(asyncio.create_task(ask(port, headers, text, stream)))
        good = await asyncio.gather(*asks)
    for worker in workers:
        worker.server.close()
    errors = good.count(False)
    share = sum(worker.asked for worker in workers[: options.refusing]) / len(good)
    return len(good), errors, share


async def main():
    options = arguments()
    print("| workers | refuses by | load | policy | requests | client errors | asked of the refuser |")
    print("|---|---|---|---|---|---|---|")
    for size in options.workers:
        for refuses in options.refusers:
            for load in options.loads:
                for policy in options.policies:
                    requests, errors, share = await run(options, size, refuses, load, policy)
                    row = [size, refuses, load, policy, requests, errors, f"{100 * share:.1f} %"]
                    print("| " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
