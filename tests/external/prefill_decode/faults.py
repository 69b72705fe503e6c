"""What becomes of requests whose legs break, with real engines: engines that are killed, that refuse, and clients that leave, in each
leg. See README.md."""

import contextlib
import http.client
import json
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from legs import BLOCKS, EXACT, Engine, Gateway, Part, answered, arguments, nothing_is_left, series, text, tiny_model
from fleet import MODEL, ask

WORDS = 300
PATIENCE_S = 60
# A gateway finds out by a probe that an engine is there again.
BACK_S = 120


def until(holds, what, patience_s=PATIENCE_S):
    """What `holds` returns, once that is true."""
    end = time.monotonic() + patience_s
    while not (found := holds()):
        if time.monotonic() > end:
            sys.exit(f"{what}: not within {patience_s} s")
        time.sleep(0.02)
    return found


class Stage:
    """Two engines for each part, one that answers alone, and the gateway."""

    def __init__(self, args):
        self.args, self.chance, self.pool = args, random.Random(args.seed), ThreadPoolExecutor(8)
        self.model = tiny_model(args, "varied")
        self.alone = Engine(args, args.scratch, self.model, "alone", BLOCKS, EXACT)
        self.parts = {role: [Part(args, self.model, f"{role}-{nth}", role) for nth in range(2)] for role in ("prefill", "decode")}
        self.gateway = None

    def engines(self):
        return [*self.parts["prefill"], *self.parts["decode"]]

    def start(self):
        everyone = [self.alone, *self.engines()]
        for engine in everyone:
            engine.start()
        for engine in everyone:
            engine.await_ready()
        rules = '[routing]\nsplit = "always"\nprefill_from_tokens = 1\n'
        self.gateway = Gateway(self.args, self.args.scratch, self.model, self.engines(), "text", config=rules).start()

    def stop(self):
        for one in [self.alone, *self.engines(), self.gateway]:
            if one and one.process:
                one.process.stop()

    def body(self, **more):
        words = [{"role": "user", "content": text(self.chance, WORDS)}]
        return {"model": MODEL, "messages": words, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}

    def total(self, name, part=""):
        return sum(count for labels, count in series(self.gateway.admin, name).items() if part in labels)

    def done(self):
        """First legs that came to their end."""
        return self.total("keyway_prefill_legs_total", '"done"')

    def at(self, role):
        """The engine for this part that has a request of the gateway's, if one has."""
        for engine in self.parts[role]:
            if self.total("keyway_requests_in_flight", f":{engine.port}\""):
                return engine
        return None

    @contextlib.contextmanager
    def stopped(self, role):
        """No engine for this part goes on, until the end of the block; those that were killed stay dead."""
        for engine in self.parts[role]:
            engine.process.tell(signal.SIGSTOP)
        try:
            yield
        finally:
            for engine in self.parts[role]:
                engine.process.tell(signal.SIGCONT)

    def kill(self, engine):
        engine.process.stop(signal.SIGKILL)

    def all_back(self):
        """Starts those that were killed, and waits until the gateway sends requests to all of them."""
        dead = [engine for engine in self.engines() if engine.process.process.poll() is not None]
        for engine in dead:
            engine.start()
        for engine in dead:
            engine.await_ready()
        ready = lambda: all(worker["state"] == "ready" for worker in json.loads(ask(self.gateway.admin, "GET", "/workers")[1]))
        until(ready, "the gateway sees all engines again", BACK_S)

    def whole(self, body):
        """An answer that is no stream: its status, text and prompt tokens."""
        status, said = ask(self.gateway.port, "POST", "/v1/chat/completions", body)
        said = json.loads(said)
        if status != 200:
            return status, said["error"]["message"], None
        return status, said["choices"][0]["message"]["content"], said["usage"]["prompt_tokens"]

    def alone_says(self, body):
        said, usage = answered(self.alone.port, "/v1/chat/completions", body)
        return 200, said, usage["prompt_tokens"]

    def open(self, body):
        """A request whose answer is read later, or never."""
        connection = http.client.HTTPConnection("127.0.0.1", self.gateway.port, timeout=300)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        return connection

    def is_as_alone(self, body, asked):
        got, wanted = asked.result(PATIENCE_S), self.alone_says(body)
        return "the answer of one engine alone" if got == wanted else f"{got}, alone {wanted}"


EQUAL = "the answer of one engine alone"
# What each fault has to come to.
FAULTS = {}


def fault(outcome):
    def add(injects):
        FAULTS[injects.__doc__] = (injects, outcome)
        return injects
    return add


@fault(EQUAL)
def first_leg_dies(stage):
    """the engine for prefill is killed in the first leg"""
    body = stage.body()
    with stage.stopped("prefill"):
        asked = stage.pool.submit(stage.whole, body)
        stage.kill(until(lambda: stage.at("prefill"), "a first leg"))
    return stage.is_as_alone(body, asked)


@fault(EQUAL)
def prefill_dies_between(stage):
    """it is killed between the legs, with the KV that it has"""
    body, before = stage.body(), {engine: done_at(stage, engine) for engine in stage.parts["prefill"]}
    with stage.stopped("decode"):
        asked = stage.pool.submit(stage.whole, body)
        by = until(lambda: [engine for engine, legs in before.items() if done_at(stage, engine) > legs], "the first leg's end")
        stage.kill(by[0])
    return stage.is_as_alone(body, asked)


def done_at(stage, engine):
    rows = series(stage.gateway.admin, "keyway_prefill_legs_total").items()
    return sum(count for labels, count in rows if f":{engine.port}\"" in labels and '"done"' in labels)


@fault(EQUAL)
def decode_dies_between(stage):
    """the engine for decode is killed before it has fetched"""
    body, before = stage.body(), stage.done()
    with stage.stopped("decode"):
        asked = stage.pool.submit(stage.whole, body)
        until(lambda: stage.done() > before, "the first leg's end")
        stage.kill(until(lambda: stage.at("decode"), "the second leg"))
    return stage.is_as_alone(body, asked)


@fault("its text so far, then an error")
def decode_dies_behind_content(stage):
    """it is killed behind the first words of a stream"""
    body = stage.body(stream=True, max_tokens=600)
    connection = stage.open(body)
    answer = connection.getresponse()
    first = next(line for line in answer if b'"content":"' in line and b'"content":""' not in line)
    stage.kill(until(lambda: stage.at("decode"), "the second leg"))
    rest = [line for line in answer if line.startswith(b"data: ")]
    connection.close()
    is_error = rest and b'"error"' in rest[-1] and b"[DONE]" not in rest[-1]
    return "its text so far, then an error" if first and is_error else f"{len(rest)} events, the last {rest[-1:]}"


@fault("400")
def decode_refuses(stage):
    """the engine for decode refuses what the one for prefill took"""
    status, said, _ = stage.whole(stage.body(max_tokens=100_000))
    return str(status) if "100000" in said or "max" in said else f"{status} {said}"


@fault("400")
def both_refuse(stage):
    """both refuse: the prompt is too long"""
    words = [{"role": "user", "content": text(stage.chance, 6000)}]
    status, said, _ = stage.whole(stage.body(messages=words))
    return str(status) if said else "no words"


def leave(stage, connection):
    connection.close()
    until(lambda: not stage.total("keyway_requests_in_flight"), "the gateway has left, too")
    return "left everywhere"


@fault("left everywhere")
def leaves_in_first_leg(stage):
    """the client leaves in the first leg"""
    with stage.stopped("prefill"):
        connection = stage.open(stage.body())
        until(lambda: stage.at("prefill"), "a first leg")
        told = leave(stage, connection)
    return told


@fault("left everywhere")
def leaves_between(stage):
    """it leaves when the prompt is computed and nothing fetched"""
    before = stage.done()
    with stage.stopped("decode"):
        connection = stage.open(stage.body())
        until(lambda: stage.done() > before, "the first leg's end")
        until(lambda: stage.at("decode"), "the second leg")
        told = leave(stage, connection)
    return told


@fault("left everywhere")
def leaves_behind_content(stage):
    """it leaves behind the first words of a stream"""
    connection = stage.open(stage.body(stream=True, max_tokens=2000))
    answer = connection.getresponse()
    next(line for line in answer if b'"content":"' in line)
    return leave(stage, connection)


def idle(stage):
    """Whether no engine has a request any more."""
    with contextlib.suppress(OSError):
        return not any(engine.busy() for engine in stage.engines())
    return False


def main():
    parse = arguments(__doc__)
    parse.add_argument("--times", type=int, default=1, help="how often each fault is injected")
    args = parse.parse_args()
    stage, wrong = Stage(args), 0
    try:
        stage.start()
        for what, (injects, wanted) in FAULTS.items():
            for _ in range(args.times):
                got = injects(stage)
                stage.all_back()
                left = until(lambda: idle(stage), f"{what}: engines that have nothing to do")
                after = stage.body()
                legs = stage.done()
                serves = stage.whole(after) == stage.alone_says(after) and stage.done() > legs
                wrong += got != wanted or not serves or not left
                print(f"{what}: {got}{'' if serves else '; the next request is not served in two legs'}", flush=True)
        clean = nothing_is_left(stage.engines())
        gateway = stage.total("keyway_requests_in_flight") + stage.total("keyway_waiting_prefill_tokens")
    finally:
        stage.stop()
    print(f"nothing left at the engines: {clean}; at the gateway: {gateway:.0f}")
    sys.exit(bool(wrong or gateway or not clean))


if __name__ == "__main__":
    main()
