"""Four clients read streams whose worker breaks off after each event in turn, with resume off and on. See run.sh."""

import argparse
import asyncio
import collections
import contextlib
import importlib.metadata
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import threading

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no look at the network

import httpx
import httpx_sse
import litellm
import openai

MODEL, PROMPT, MAX_TOKENS = "keyway-random", "Tell me what a client makes of a broken stream.", 12
WORKERS = 3


def python_client(base):
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    text, finish = "", None
    for chunk in client.chat.completions.create(**request()):
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
    return text, finish


def litellm_client(base):
    text, finish = "", None
    answer = litellm.completion(api_base=base, api_key="none", num_retries=0, **request(model=f"openai/{MODEL}"))
    for chunk in answer:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
    return text, finish


def raw_client(base):
    """Events by the standard's rules; whole with [DONE] alone."""
    text, finish, done = "", None, False
    with httpx.Client(timeout=30) as client:
        url = f"{base}/chat/completions"
        with httpx_sse.connect_sse(client, "POST", url, json=request()) as source:
            for event in source.iter_sse():
                if event.data == "[DONE]":
                    done = True
                    continue
                data = json.loads(event.data)
                if "error" in data:
                    raise RuntimeError(data["error"]["message"])
                for choice in data["choices"]:
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
    if not done:
        raise RuntimeError("no [DONE]")
    return text, finish


def node_client(script):
    def client(base):
        command = ["node", script, base, MODEL, PROMPT, str(MAX_TOKENS)]
        said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)
        if said["error"]:
            raise RuntimeError(said["error"])
        return said["text"], said["finish"]

    return client


def request(model=MODEL):
    return {"model": model, "messages": [{"role": "user", "content": PROMPT}], "stream": True, "temperature": 0,
            "max_tokens": MAX_TOKENS}


class Cutter:
    """TCP proxies that share a count of events: whoever carries the one after the last breaks its connection."""

    def __init__(self):
        self.left, self.loop = None, asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def in_front_of(self, port):
        async def start():
            server = await asyncio.start_server(lambda r, w: self.carry(port, r, w), "127.0.0.1", 0)
            return server.sockets[0].getsockname()[1]

        return asyncio.run_coroutine_threadsafe(start(), self.loop).result()

    async def carry(self, port, reader, writer):
        upstream, request = await asyncio.open_connection("127.0.0.1", port)
        tasks = [asyncio.create_task(self.copy(reader, request, False)),
                 asyncio.create_task(self.copy(upstream, writer, True))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for end in (writer, request):
            end.close()
        for task in tasks:
            task.cancel()

    async def copy(self, reader, writer, counts):
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                cut = None
                for event in re.finditer(rb"data: ", data) if counts and self.left is not None else ():
                    if self.left == 0:
                        cut, self.left = event.start() + 9, None
                        break
                    self.left -= 1
                writer.write(data[:cut])
                await writer.drain()
                if cut is not None:
                    return


@contextlib.contextmanager
def process(command, announces):
    environment = dict(os.environ, RUST_LOG="info", NO_COLOR="1")
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        found = {}
        while len(found) < len(announces):
            line = child.stdout.readline()
            if not line:
                sys.exit(f"{command[0]} ended early")
            for name, pattern in announces.items():
                if match := re.search(pattern, line):
                    found[name] = int(match[1])
        threading.Thread(target=collections.deque, args=(child.stdout, 0), daemon=True).start()
        yield found
    finally:
        child.kill()
        child.wait()


@contextlib.contextmanager
def gateway(bins, ports, enabled):
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        workers = ", ".join(f'"http://127.0.0.1:{port}"' for port in ports)
        config.write(f"worker = [{workers}]\n[resume]\nenabled = {'true' if enabled else 'false'}\n")
        config.flush()
        command = [bins / "keyway", "--config", config.name, "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
        announces = {"port": r"listening on http://127.0.0.1:(\d+)", "admin": r"admin on http://127.0.0.1:(\d+)"}
        with process(command, announces) as found:
            admin = f"http://127.0.0.1:{found['admin']}/workers"
            while [w["state"] for w in httpx.get(admin).json()] != ["ready"] * len(ports):
                pass
            yield f"http://127.0.0.1:{found['port']}/v1"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bins", type=pathlib.Path, required=True)
    parser.add_argument("--node", required=True)
    args = parser.parse_args()
    clients = {"openai (Python)": python_client, "openai (npm)": node_client(args.node), "litellm": litellm_client,
               "raw SSE (httpx-sse)": raw_client}
    package = json.loads((pathlib.Path(args.node).parent / "node_modules/openai/package.json").read_text())
    versions = {name: importlib.metadata.version(name) for name in ("openai", "litellm", "httpx-sse")}
    print(f"versions: {versions}, openai (npm) {package['version']}")
    cutter, wrong = Cutter(), 0
    print("| client | resume | cuts | errors | whole answers |\n|---|---|---|---|---|")
    with contextlib.ExitStack() as stack:
        command = [args.bins / "keyway-worker", "--model", "random", "--listen", "127.0.0.1:0"]
        ready = {"port": r"ready on http://127.0.0.1:(\d+)"}
        workers = [stack.enter_context(process(command, ready))["port"] for _ in range(WORKERS)]
        ports = [cutter.in_front_of(port) for port in workers]
        for enabled in (False, True):
            for name, client in clients.items():
                # A gateway for each: workers' breakers remember what clients before have met.
                with gateway(args.bins, ports, enabled) as base:
                    whole = client(base)
                    cuts = httpx.post(f"{base}/chat/completions", json=request()).text.count("data: ")
                    outcomes = collections.Counter()
                    for events in range(cuts):
                        cutter.left = events
                        try:
                            outcomes["whole" if client(base) == whole else "wrong"] += 1
                        except Exception:
                            outcomes["error"] += 1
                        assert cutter.left is None, f"the stream has fewer than {events} events"
                expected = {"whole": cuts} if enabled else {"error": cuts}
                wrong += outcomes != collections.Counter(expected)
                print(f"| {name} | {'on' if enabled else 'off'} | {cuts} | {outcomes['error']} | {outcomes['whole']} |"
                      + (f" WRONG: {dict(outcomes)}" if outcomes != collections.Counter(expected) else ""), flush=True)
    sys.exit(f"{wrong} rows are not as they must be" if wrong else 0)


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    main()
