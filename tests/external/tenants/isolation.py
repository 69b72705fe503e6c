"""Whether one tenant's prompt is ever found by another in a real engine's prefix cache: by the engine's own counter of hits, for every
path that it offers by POST, spelled in several ways. See README.md beside it.

The engine is asked directly first: a path on which it finds a repeated prompt there is one on which the gateway has something to
prevent, so a run without any such path fails.
"""

import argparse
import hashlib
import http.client
import json
import pathlib
import random
import re
import string
import subprocess
import sys
import tempfile
import time
import urllib.parse

WORDS = 150
# Not for clients: the gateway knows no such paths, or they change the engine.
LEFT_OUT = ("/scale_elastic_ep", "/is_scaling_elastic_ep")


def prompt(seed):
    chance = random.Random(seed)
    return " ".join("".join(chance.choices(string.ascii_lowercase, k=5)) for _ in range(WORDS))


def bodies(text, model):
    """What a path may want, in the order in which it is tried."""
    message = [{"role": "user", "content": text}]
    common = {"model": model, "max_tokens": 1}
    yield common | {"messages": message}
    yield common | {"prompt": text}
    yield {"model": model, "input": text, "max_output_tokens": 16}
    yield common | {"messages": [message]}
    yield {"model": model, "input": text}
    yield {"model": model, "query": text, "items": ["a", "b"], "label_token_ids": [5, 6]}
    yield {"model": model, "query": text, "documents": ["a", "b"]}
    yield {"model": model, "text_1": text, "text_2": text}
    yield {"model": model, "state": text, "questions": ["which?"]}
    yield {"model": model, "prompt": text, "tokens": [5, 6, 7]}
    ids = [5 + letter % 90 for letter in text.encode()]
    yield {"model": model, "token_ids": ids, "sampling_params": {"max_tokens": 1}}


def spellings(path):
    """The path as it is, and as somebody writes it who wants it to be taken for another."""
    last = path.rfind("/") + 1
    escaped = f"{path[:last]}%{ord(path[last]):02x}{path[last + 1:]}"
    everything = "/" + "/".join("".join(f"%{ord(c):02X}" for c in part) for part in path[1:].split("/"))
    yield "as it is", path
    yield "one letter escaped", escaped
    yield "every letter escaped", everything
    yield "escaped slash", path[:last - 1] + "%2F" + path[last:] if last > 1 else "/%2F" + path[1:]
    yield "slash behind", path + "/"
    yield "two slashes", path[:last] + "/" + path[last:]
    yield "through a dot", path[:last] + "./" + path[last:]


class Server:
    def __init__(self, url):
        self.address = urllib.parse.urlsplit(url).netloc

    def ask(self, method, path, body=None, key=None):
        connection = http.client.HTTPConnection(self.address, timeout=120)
        headers = {"content-type": "application/json"} if body else {}
        if key:
            headers["authorization"] = f"Bearer {key}"
        connection.request(method, path, json.dumps(body) if body else None, headers)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, text

    def hits(self):
        page = self.ask("GET", "/metrics")[1].decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith("vllm:prefix_cache_hits_total"))

    def found(self, asked):
        """Tokens that the engine finds in its cache for what is asked meanwhile; it counts them a moment later."""
        before = self.hits()
        status = asked()
        time.sleep(0.3)
        return status, int(self.hits() - before)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keyway", type=pathlib.Path, required=True)
    parser.add_argument("--engine", required=True, help="URL of a vLLM that serves with --enable-prefix-caching")
    parser.add_argument("--config", default="", help="more lines for [auth]")
    args = parser.parse_args()
    engine = Server(args.engine)
    model = json.loads(engine.ask("GET", "/v1/models")[1])["data"][0]["id"]
    version = json.loads(engine.ask("GET", "/version")[1])["version"]
    offered = json.loads(engine.ask("GET", "/openapi.json")[1])["paths"]
    paths = [path for path, methods in offered.items() if "post" in methods and path not in LEFT_OUT]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        keys = {name: f"kw-{name}-{random.getrandbits(64):x}" for name in ("a", "b")}
        tables = [f'[[tenant]]\nname = "{name}"\nkey_sha256 = ["{hashlib.sha256(key.encode()).hexdigest()}"]\n' for name, key in keys.items()]
        (folder / "tenants.toml").write_text("".join(tables), encoding="utf-8")
        (folder / "keyway.toml").write_text(
            f'worker = ["{args.engine}"]\n[auth]\ntenants_file = "{folder}/tenants.toml"\n{args.config}\n', encoding="utf-8")
        command = [args.keyway, "--config", folder / "keyway.toml", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            sys.exit(compare(engine, gateway(folder / "log"), paths, keys, model, version))
        finally:
            process.terminate()
            process.wait()


def gateway(log):
    for _ in range(200):
        found = re.search(r"listening on (http://\S+)", log.read_text(encoding="utf-8", errors="replace"))
        if found:
            server = Server(found[1])
            time.sleep(2)
            return server
        time.sleep(0.1)
    raise SystemExit(f"the gateway does not listen: {log.read_text(encoding='utf-8', errors='replace')}")


def compare(engine, front, paths, keys, model, version):
    print(f"vLLM {version}, {len(paths)} paths by POST\n")
    print("| path | spelled | a | a again | b | found for a again | found for b | |\n|---|---|---|---|---|---|---|---|")
    shares, leaks, serial = 0, [], 0
    for path in paths:
        own = 0
        for number in range(len(list(bodies("", model)))):
            text = prompt(f"direct {path} {number}")
            body = list(bodies(text, model))[number]
            status = engine.ask("POST", path.replace("{response_id}", "r"), body)[0]
            if status == 200:
                own = engine.found(lambda body=body: engine.ask("POST", path, body)[0])[1]
                break
        shares += own > 0
        print(f"| `{path}` | at the engine itself | {status} | | | {own} | | |", flush=True)
        for how, target in spellings(path.replace("{response_id}", "r")):
            serial += 1
            text = prompt(serial)
            body = list(bodies(text, model))[number] | {"cache_salt": "chosen by the client"}
            first = front.ask("POST", target, body, keys["a"])[0]
            again, own = engine.found(lambda: front.ask("POST", target, body, keys["a"])[0])
            # Asked by the other tenant, spelled so and as it is: what one spelling has left there another must not find.
            other, found = engine.found(lambda: front.ask("POST", target, body, keys["b"])[0])
            plain = engine.found(lambda: front.ask("POST", path, body, keys["b"])[0])[1] if other != 200 else 0
            found = max(found, plain)
            if found:
                leaks.append(target)
            print(f"| | {how} | {first} | {again} | {other} | {own} | {found} | {'**shared**' if found else ''} |", flush=True)
    print(f"\nOn {shares} paths the engine itself finds what another has asked; through the gateway on {len(leaks)}.")
    return 1 if leaks or not shares else 0


if __name__ == "__main__":
    main()
