"""Nine clients read streams that end badly in ten ways, in four APIs, through a gateway: what does each make of it?

Each must raise an error of its own: a client that ends in peace hands half an answer on as a whole one. One worker, resume
off, so that nothing is mended on the way. See run.sh."""

import argparse
import collections
import contextlib
import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time

import httpx

import ends_clients
from ends_worker import ENDS, Worker

NODE = {"openai (npm)": ("chat", "completions", "responses"), "anthropic (npm)": ("messages",),
        "ai + @ai-sdk/openai": ("chat", "completions", "responses"),
        "ai + @ai-sdk/openai-compatible": ("chat", "completions"), "ai + @ai-sdk/anthropic": ("messages",)}
NO_FINISH_REASON = ("responses", "messages")
PACKAGES = ("openai", "@anthropic-ai/sdk", "ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic")


class Gateway:
    """`keyway` in front of one worker."""

    def __init__(self, binary, port):
        self.config = tempfile.NamedTemporaryFile("w", suffix=".toml")
        self.config.write(f'worker = ["http://127.0.0.1:{port}"]\n[resume]\nenabled = false\n')
        self.config.flush()
        command = [binary, "--config", self.config.name, "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                      env={"RUST_LOG": "info", "NO_COLOR": "1"})
        found = {}
        while len(found) < 2:
            line = self.child.stdout.readline() or sys.exit(f"{binary} ended early")
            for name, pattern in (("data", r"listening on (http://\S+)"), ("admin", r"admin on (http://\S+)")):
                if match := re.search(pattern, line):
                    found[name] = match[1]
        threading.Thread(target=collections.deque, args=(self.child.stdout, 0), daemon=True).start()
        self.base = found["data"].rstrip("/") + "/v1"

    def ready(self):
        """Waits until a whole answer passes: the worker is back, and no breaker remembers the stream before."""
        for _ in range(600):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.post(self.base + "/chat/completions", json={"model": "m", "messages": []}).status_code == 200:
                    return
            time.sleep(0.1)
        sys.exit("the worker did not come back")

    def stop(self):
        self.child.kill()
        self.child.wait()


class Node:
    """The clients for JavaScript, in one process."""

    def __init__(self, node, script):
        self.child = subprocess.Popen([node, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self, client, api, base, prompt):
        self.child.stdin.write(json.dumps({"client": client, "api": api, "base": base, "prompt": prompt}) + "\n")
        self.child.stdin.flush()
        return json.loads(self.child.stdout.readline() or sys.exit("node ended early"))


def outcome(answer):
    """In a word: ended (in peace), told (an event says it to the program), hung, or the class that was raised."""
    if answer.get("error") == "Told":
        return "told"
    if "error" in answer:
        hung = any("Timeout" in kind for kind in answer["kinds"]) or "timeout" in answer["message"].lower()
        return "hung" if hung else answer["error"]
    return "ended"


def right(end, said):
    return said == "ended" if not ENDS[end] else said not in ("ended", "hung", None)


def measure(binary, clients, node, ends):
    worker, results = Worker(), {}
    gateway = Gateway(binary, worker.port)
    try:
        for name, apis in clients.items():
            for api in apis:
                read = node.read if name in NODE else ends_clients.read
                for end in ends:
                    if end == "finish reason abort" and api in NO_FINISH_REASON:
                        continue
                    gateway.ready()
                    served = worker.served
                    answer = read(name, api, gateway.base, f"end:{end}")
                    worker.revive()
                    if worker.served == served:
                        sys.exit(f"{name}, {api}, {end}: the worker was never asked: {answer}")
                    results[name, api, end] = outcome(answer)
                    print(f"{name:32}{api:13}{end:30}{outcome(answer)}", file=sys.stderr, flush=True)
    finally:
        gateway.stop()
    return results


def table(api, names, ends, columns):
    lines = [f"\n`{api}`:\n", "| the stream | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for end in ends:
        cells = []
        for name in names:
            said = [results.get((name, api, end)) for results in columns]
            if said[-1] is None:
                break
            marked = [one if right(end, one) else f"**{one}**" for one in said if one]
            cells.append(" → ".join(dict.fromkeys(marked)))
        if cells:
            lines.append(f"| {end} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def versions(node_modules):
    python = [f"{name} {importlib.metadata.version(name)}" for name in ("openai", "anthropic", "litellm", "httpx-sse")]
    packages = [(name, json.loads((node_modules / name / "package.json").read_text())["version"]) for name in PACKAGES]
    return ", ".join(python + [f"{name} {version} (npm)" for name, version in packages])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keyway", required=True, help="the gateway")
    parser.add_argument("--save", type=pathlib.Path, help="keep the outcomes in this file")
    parser.add_argument("--before", type=pathlib.Path, help="outcomes kept by --save: they stand before an arrow")
    parser.add_argument("--node", required=True, help="the interpreter")
    parser.add_argument("--script", type=pathlib.Path, required=True, help="ends_clients.mjs beside its node_modules")
    parser.add_argument("--only", default="", help="clients, ends or APIs with this in their names")
    args = parser.parse_args()
    every = {**{name: apis for name, (_, apis) in ends_clients.CLIENTS.items()}, **NODE}
    ends = [end for end in ENDS if args.only in end] or list(ENDS)
    clients = {name: apis for name, apis in every.items() if args.only in name} or every
    node = Node(args.node, str(args.script))
    before = {tuple(key): said for key, said in json.loads(args.before.read_text())} if args.before else None
    results = measure(args.keyway, clients, node, ends)
    if args.save:
        args.save.write_text(json.dumps([[key, said] for key, said in results.items()], indent=0))
    columns = [before, results] if before else [results]
    print(versions(args.script.parent / "node_modules"))
    for api in ends_clients.PATHS:
        names = [name for name, apis in clients.items() if api in apis]
        if names:
            print(table(api, names, ends, columns))
    wrong = {key: said for key, said in results.items() if not right(key[2], said)}
    sys.exit("".join(f"{key}: {said}\n" for key, said in wrong.items()) + f"{len(wrong)} of {len(columns[-1])} wrong"
             if wrong else 0)


if __name__ == "__main__":
    main()
