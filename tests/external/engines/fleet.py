"""Real engines on the CPU, vLLM or SGLang, with a gateway in front, for the scripts beside this one."""

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

BLOCK_TOKENS = 32
MODEL = "tiny"
READY_S = 600


def arguments(what):
    """Those that every script takes."""
    parse = argparse.ArgumentParser(description=what)
    parse.add_argument("--keyway", type=pathlib.Path, required=True)
    parse.add_argument("--vllm", type=pathlib.Path, required=True, help="virtual environment that has vLLM")
    parse.add_argument("--scratch", type=pathlib.Path, required=True)
    parse.add_argument("--seed", type=int, default=1)
    parse.add_argument("--sglang", type=pathlib.Path, help="virtual environment that has SGLang")
    parse.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    return parse


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def ask(port, method, path, body=None, timeout=300):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    connection.request(method, path, json.dumps(body) if body is not None else None, {"content-type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def await_ready(port, path, process, log):
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        if process.poll() is not None:
            sys.exit(f"it ended with {process.returncode} before it was ready: see {log}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            if ask(port, "GET", path, timeout=5)[0] == 200:
                return
        time.sleep(0.5)
    sys.exit(f"it is not ready after {READY_S} s: see {log}")


def series(port, name):
    """All samples of a metric, by their labels as written."""
    page = ask(port, "GET", "/metrics")[1]
    rows = [line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return {row[len(name):row.rindex(" ")]: float(row[row.rindex(" "):]) for row in rows}


class Process:
    def __init__(self, command, log, env=None):
        self.log = log
        with open(log, "ab") as out:
            self.process = subprocess.Popen([str(part) for part in command], stdout=out, stderr=out, start_new_session=True,
                                            env={**os.environ, **(env or {})})

    def stop(self, how=signal.SIGTERM, patience_s=30):
        self.tell(how)
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


    def tell(self, signal_number):
        """Signals all of its processes; does not wait."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal_number)


class Engine:
    """One vLLM. Its events are bound to every address, as it connects to a single one."""

    CORE = "VLLM::EngineCore"

    def __init__(self, args, scratch, model, nth, blocks, flags=()):
        self.port, self.events, self.replay = free_port(), free_port(), free_port()
        self.args, self.model, self.blocks, self.flags, self.block_tokens = args, model, blocks, flags, BLOCK_TOKENS
        self.log, self.process = scratch / f"engine-{nth}.log", None
        # Beyond what every engine gets.
        self.env = {}

    def start(self):
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{self.events}",
                  "replay_endpoint": f"tcp://*:{self.replay}", "topic": "kv-events"}
        env = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
               "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_SERVER_DEV_MODE": "1", **self.env}
        command = [self.args.vllm / "bin/python", "-m", "vllm.entrypoints.cli.main", "serve", self.model, "--served-model-name", MODEL,
                   "--host", "127.0.0.1", "--port", self.port, "--block-size", self.block_tokens, "--num-gpu-blocks-override", self.blocks,
                   "--max-model-len", 3072, "--max-num-batched-tokens", 1024, "--max-num-seqs", 32, "--enforce-eager", "--enable-prompt-tokens-details",
                   "--kv-events-config", json.dumps(events), *self.flags]
        self.process = Process(command, self.log, env)
        return self

    def await_ready(self):
        await_ready(self.port, "/health", self.process.process, self.log)

    def counted(self):
        """Tokens that it looked for in its cache and that it found there, by its own count."""
        total = lambda name: sum(series(self.port, name).values())
        return total("vllm:prefix_cache_queries_total"), total("vllm:prefix_cache_hits_total")

    def busy(self):
        """Requests that it has."""
        return sum(sum(series(self.port, f"vllm:num_requests_{state}").values()) for state in ("running", "waiting"))

    def forget(self):
        """Empties its cache."""
        status, body = ask(self.port, "POST", "/reset_prefix_cache")
        if status != 200:
            sys.exit(f"its cache is not reset: {status} {body}")

    def worker(self):
        """Its URL is enough: it says itself where its events are."""
        return f"http://127.0.0.1:{self.port}"


class SGLang(Engine):
    """One SGLang, whose pages are as many and as large."""

    CORE = "sglang::scheduler"

    def start(self):
        events = {"publisher": "zmq", "endpoint": f"tcp://*:{self.events}", "replay_endpoint": f"tcp://*:{self.replay}", "topic": "kv-events"}
        env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [self.args.sglang / "bin/python", "-m", "sglang.launch_server", "--model-path", self.model, "--served-model-name", MODEL,
                   "--device", "cpu", "--attention-backend", "torch_native", "--host", "127.0.0.1", "--port", self.port,
                   "--page-size", self.block_tokens, "--max-total-tokens", self.blocks * self.block_tokens, "--context-length", 3072,
                   "--chunked-prefill-size", 1024, "--max-running-requests", 32, "--mem-fraction-static", 0.05, "--disable-overlap-schedule",
                   "--sleep-on-idle", "--skip-server-warmup", "--enable-metrics", "--enable-cache-report", "--tool-call-parser", "hermes",
                   "--load-publish-endpoint", f"tcp://*:{free_port()}", "--kv-events-config", json.dumps(events), *self.flags]
        self.process = Process(command, self.log, env)
        return self

    def counted(self):
        total = lambda name: sum(series(self.port, name).values())
        return total("sglang:prompt_tokens_total"), total("sglang:cached_tokens_total")

    def busy(self):
        return sum(sum(series(self.port, f"sglang:num_{state}_reqs").values()) for state in ("running", "queue"))

    def forget(self):
        status, body = ask(self.port, "POST", "/flush_cache")
        if status != 200:
            sys.exit(f"its cache is not flushed: {status} {body}")


def new_engine(args, *rest):
    return {"vllm": Engine, "sglang": SGLang}[args.engine](args, *rest)


class Gateway:
    def __init__(self, args, scratch, model, engines, by, name="gateway", config=""):
        self.port, self.admin = free_port(), free_port()
        self.decisions = scratch / f"{name}-decisions.jsonl"
        self.log = scratch / f"{name}.log"
        file = scratch / f"{name}.toml"
        file.write_text(config)
        workers = [part for engine in engines for part in ("--worker", engine.worker())]
        tokens = ["--tokenizer", f"{MODEL}={model}"] if by not in ("text", "ids") else []
        self.command = [args.keyway, "--config", file, "--listen", f"127.0.0.1:{self.port}", "--admin-listen", f"127.0.0.1:{self.admin}",
                        "--decision-log", self.decisions, *tokens, *workers]
        self.process = None
        self.engines, self.by, self.env = engines, by, {"RUST_LOG": os.environ.get("KEYWAY_LOG", "info")}

    def start(self):
        self.begin()
        await_ready(self.admin, "/readyz", self.process.process, self.log)
        self.await_events()
        return self

    def begin(self):
        """Without waiting for its engines."""
        self.decisions.unlink(missing_ok=True)
        self.process, self.first = Process(self.command, self.log, self.env), 0
        await_ready(self.admin, "/livez", self.process.process, self.log)

    def await_events(self):
        """Until it follows the events of all its engines, where it is to go by them."""
        if self.by == "ids":
            # Without a tokenizer the engines are asked for their events once a prompt has come as ids.
            ask(self.port, "POST", "/inference/v1/generate", {"model": MODEL, "token_ids": list(range(10, 74)), "sampling_params": {"max_tokens": 1}})
        until = time.monotonic() + 60
        while self.by != "text" and sum(series(self.admin, "keyway_kv_events_trusted").values()) < len(self.engines):
            if time.monotonic() > until:
                sys.exit(f"the engines' events are not trusted after a minute: see {self.log}")
            time.sleep(0.2)
        self.first = len(self.decided())

    def decided(self):
        """The choices so far, since it was started."""
        lines = self.decisions.read_text().splitlines() if self.decisions.exists() else []
        return [json.loads(line) for line in lines][self.first:]

    def decision(self, nth):
        """The choice of this number, from 0; it is written beside the answer, and may come after it."""
        until = time.monotonic() + 10
        while len(self.decided()) <= nth:
            if time.monotonic() > until:
                sys.exit(f"there is no choice {nth} in {self.decisions}")
            time.sleep(0.01)
        return self.decided()[nth]


def tiny_model(args, kind):
    """The folder of a model; it is made there unless it is there."""
    model = args.scratch / kind
    if not model.exists():
        here = pathlib.Path(__file__).parent
        subprocess.run([args.vllm / "bin/python", here / "tiny_model.py", kind, model], check=True)
    return model


@contextlib.contextmanager
def running(args, kind, engines, blocks, by):
    """Engines of one tiny model and a gateway, until the end of the block."""
    scratch, model, started = args.scratch, tiny_model(args, kind), []
    try:
        for nth in range(engines):
            flags = {"ids": ["--enable-scale-out"]}.get(by, ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"])
            started.append(new_engine(args, args.scratch, model, nth, blocks, flags).start())
        for engine in started:
            engine.await_ready()
        gateway = Gateway(args, scratch, model, list(started), by).start()
        started.append(gateway)
        yield gateway
    finally:
        for one in started:
            one.process.stop()
