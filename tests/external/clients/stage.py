"""Gateways in front of what the clients talk to: two workers of ours with one of their own models, or one vLLM, which may be asked for
chats alone."""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import sys
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "engines"))
from fleet import MODEL, Engine, Gateway, Process, ask, await_ready, free_port, series, tiny_model  # noqa: E402

# Agents' prompts are long, and the tiny model's tokens are hardly more than letters.
MODEL_LEN = 32768
BLOCKS = 2560
# Targets whose engine is vLLM; the second is asked for chats alone.
VLLM = ("vllm", "translated")
# Calls follow their schemas though a client says nothing of `strict`, and thoughts have a budget. The text is not parsed for thoughts:
# random weights begin one and never end it.
AS_AGENTS_NEED = ["--tool-strict-level", "parameter", "--reasoning-config",
                  json.dumps({"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"})]
# Of clients that a second gateway knows, and lets ask once in ten seconds.
KEYS = ("anthropic-python", "openai-python", "anthropic-node", "openai-node")


class Worker:
    """One keyway-worker, as the gateway of fleet.py wants its engines."""

    def __init__(self, args, model, nth):
        self.port, self.log = free_port(), args.scratch / f"{model}-{nth}.log"
        self.command = [args.worker, "--model", model, "--listen", f"127.0.0.1:{self.port}"]

    def start(self):
        self.process = Process(self.command, self.log)
        return self

    def await_ready(self):
        await_ready(self.port, "/health", self.process.process, self.log)

    def worker(self):
        return f"http://127.0.0.1:{self.port}"


class Target:
    """What a client's checks are run against, and what they may ask of it."""

    def __init__(self, name, model, gateways, workers):
        self.name, self.model, self.workers = name, model, workers
        self.base, self.guarded = (f"http://127.0.0.1:{gateway.port}" for gateway in gateways)
        self.is_vllm = name in VLLM

    def total(self, metric):
        """A metric's sum over all workers and labels."""
        return sum(sum(series(worker.port, metric).values()) for worker in self.workers)

    def finished(self):
        """Answers that came to their end; those that were left do not count."""
        return self.total("vllm:request_success_total")

    def is_free(self, patience_s=20):
        """Whether all workers soon have nothing to do."""
        until = time.monotonic() + patience_s
        while self.total("vllm:num_requests_running") + self.total("vllm:num_requests_waiting"):
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def version(self):
        if not self.is_vllm:
            return f"2 keyway-worker --model {self.name}"
        return "vLLM " + re.search(r'"version":"([^"]+)', ask(self.workers[0].port, "GET", "/version")[1]).group(1)


@contextlib.contextmanager
def target(args, name):
    """A target of this name (random, builtin, vllm or translated), until the end of the block."""
    started = []
    try:
        if name in VLLM:
            os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
            model, folder = MODEL, tiny_model(args, "agent")
            flags = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-model-len", MODEL_LEN, *AS_AGENTS_NEED]
            started.append(Engine(args, args.scratch, folder, 0, BLOCKS, flags).start())
        else:
            model, folder = f"keyway-{name}", None
            started += [Worker(args, name, nth).start() for nth in range(2)]
        for one in started:
            one.await_ready()
        workers = list(started)
        tenants = args.scratch / "tenants.toml"
        tables = ((key, hashlib.sha256(key.encode()).hexdigest()) for key in KEYS)
        tenants.write_text("".join(f'[[tenant]]\nname = "{key}"\nkey_sha256 = ["{of}"]\nrequests_per_minute = 6\n' for key, of in tables))
        which = {"vllm": '"custom-tools"', "translated": "true"}.get(name)
        models = f"[[model]]\nname = '{model}'\ntokenizer = '{folder}'\ntranslate = {which}\n" if which else ""
        for kind, config in (("open", models), ("guarded", f"[auth]\ntenants_file = '{tenants}'\n{models}")):
            gateway = Gateway(args, args.scratch, folder, workers, "text", f"{name}-{kind}", config)
            gateway.command.append("--expose")
            started.append(gateway)
            gateway.start()
        yield Target(name, model, started[-2:], workers)
    finally:
        for one in reversed(started):
            one.process.stop()
