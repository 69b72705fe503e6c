"""What clients see, and what the gateway still knows, when real engines or the gateway end in the middle. See README.md."""

import http.client
import json
import random
import signal
import subprocess
import sys
import threading
import time

from fleet import BLOCK_TOKENS, MODEL, Gateway, arguments, ask, new_engine, series, tiny_model
from predictions import Conversation, text, turn

LONG = 2400
CHAT = "/v1/chat/completions"
RESUMES = "[resume]\ncontinue_text = true\n"


class Stream:
    """A chat's stream as a client sees it: its text and its end, `done`, `cut`, or the message of an error event."""

    def __init__(self, port, words, tokens=LONG, seed=1):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.body = question(words, tokens, seed)
        self.connection.request("POST", CHAT, json.dumps(self.body), {"content-type": "application/json"})
        self.text, self.events, self.end, self.answer = "", 0, None, None

    def read(self, events=10**9):
        """So many events more, or all."""
        try:
            self.answer = self.answer or self.connection.getresponse()
            if self.answer.status != 200:
                self.end = f"{self.answer.status}: {self.answer.read().decode()}"
            until = self.events + events
            while self.end is None and self.events < until:
                line = self.answer.readline()
                if not line:
                    self.end = "cut"
                elif line.startswith(b"data: "):
                    self.see(line.removeprefix(b"data: ").strip())
        except (OSError, http.client.HTTPException) as error:
            self.end = self.end or f"cut ({type(error).__name__})"
        return self

    def see(self, data):
        if data == b"[DONE]":
            self.end = "done"
            return
        event = json.loads(data)
        if "error" in event:
            self.end = f"error: {event['error']['message']}"
        for choice in event.get("choices", []):
            self.events += 1
            self.text += choice["delta"].get("content") or ""

    def leave(self):
        self.connection.close()
        if self.answer:
            self.answer.close()


def question(words, tokens, seed):
    messages = [{"role": "user", "content": text(random.Random(seed), words)}]
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}


class Table:
    def __init__(self):
        self.failed = []
        print("| what happens | wanted | seen | |\n|---|---|---|---|", flush=True)

    def row(self, what, wanted, seen, holds):
        print(f"| {what} | {wanted} | {seen} | {'yes' if holds else '**no**'} |", flush=True)
        if not holds:
            self.failed.append(what)


class Talks:
    """Conversations that go on whatever happens, and whether it was predicted what they find."""

    def __init__(self, seed, count=6):
        self.chance = random.Random(seed)
        self.all = [Conversation(self.chance, text(self.chance, 60)) for _ in range(count)]

    def go_on(self, gateway, block_tokens=BLOCK_TOKENS):
        """A turn of each: how many predictions were within a block, and the tokens found."""
        right = found_in_all = 0
        for conversation in self.all:
            nth = len(gateway.decided())
            _, found = turn(gateway, conversation, self.chance.randint(10, 30))
            time.sleep(0.1)
            right += abs(gateway.decision(nth)["matched_tokens"] - found) <= block_tokens
            found_in_all += found
        return right, found_in_all

    def row(self, table, what, gateway, block_tokens=BLOCK_TOKENS, turns=2):
        told = [self.go_on(gateway, block_tokens) for _ in range(turns)]
        right, found = sum(one[0] for one in told), [one[1] for one in told]
        count = turns * len(self.all)
        table.row(what, f"{count} of {count} predictions within a block, in the end with something found", f"{right}; found {found} tokens",
                  right == count and found[-1] > 0)


def within(seconds, holds):
    """Whether it comes true, and after how many seconds."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > seconds:
            return False, seconds
        time.sleep(0.1)
    return True, time.monotonic() - began


def serving(gateway):
    """The engine that was chosen last."""
    worker = gateway.decided()[-1]["worker"]
    return next(engine for engine in gateway.engines if worker.endswith(f":{engine.port}"))


def start_again(engine, gateways):
    engine.start()
    engine.await_ready()
    for gateway in gateways:
        noticed, _ = within(5, lambda: sum(series(gateway.admin, "keyway_worker_ready").values()) == len(gateway.engines))
        if not noticed:
            sys.exit(f"that an engine is back is not noticed within 5 s: see {gateway.log}")
        gateway.await_events()


def slow_start(table, gateway, engines):
    gateway.begin()
    status, body = ask(gateway.port, "POST", CHAT, question(5, 5, 1))
    error = json.loads(body)["error"]["code"]
    table.row("a request before any engine has started", "503, and why", f"{status} {error}", status == 503)
    status = ask(gateway.admin, "GET", "/readyz")[0]
    table.row("`/readyz` meanwhile", "503", status, status == 503)
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.await_ready()
    holds, seconds = within(60, lambda: ask(gateway.admin, "GET", "/readyz")[0] == 200)
    table.row("the engines come up", "the gateway serves by itself", f"after {seconds:.1f} s", holds)
    gateway.await_events()


def restarts(table, gateway, args):
    talks = Talks(args.seed)
    talks.row(table, "conversations begin", gateway)
    engine = serving(gateway)
    engine.process.stop(signal.SIGKILL)
    right = sum(turn(gateway, conversation, 10)[0] > 0 for conversation in talks.all)
    table.row("an engine is killed; every conversation goes on", "6 answers", f"{right} answers", right == 6)
    start_again(engine, [gateway])
    talks.row(table, "it is started again, its cache empty", gateway)
    gateway.process.stop()
    gateway.start()
    talks.row(table, "the gateway is started again", gateway, turns=1)
    engine.process.stop()
    engine.block_tokens = 2 * BLOCK_TOKENS
    start_again(engine, [gateway])
    talks.row(table, "an engine comes back with blocks of 64 tokens", gateway, 2 * BLOCK_TOKENS)
    engine.process.stop()
    engine.block_tokens = BLOCK_TOKENS
    start_again(engine, [gateway])


def breaks(table, gateways, args):
    """Each way of ending an engine, in the middle of a stream, behind a gateway that goes on with text and one that does not."""
    plain, resumes = gateways
    whole = Stream(plain.port, 20, seed=args.seed).read()
    table.row("a stream that nothing happens to", "done", whole.end, whole.end == "done" and whole.events >= LONG / 2)
    core = plain.engines[0].CORE.split("::")[1]
    ways = {"all": ("`kill -9` of all of it", signal.SIGKILL), "term": ("SIGTERM", signal.SIGTERM),
            "core": (f"`kill -9` of its {core}", None)}
    for how, end in (ways[way] for way in args.breaks.split(",")):
        for gateway in gateways:
            stream = Stream(gateway.port, 20, seed=args.seed).read(20)
            engine = serving(gateway)
            kill(engine, end)
            began = time.monotonic()
            stream.read()
            seconds = time.monotonic() - began
            if gateway is plain:
                said = stream.end.startswith("error") and whole.text.startswith(stream.text)
                table.row(f"{how} in mid-stream", "an error event within 15 s, what came before it right", f"{stream.end}, {seconds:.1f} s",
                          said and seconds < 15)
            else:
                same = sum(1 for _ in iter(zip_same(whole.text, stream.text)))
                is_whole = stream.end == "done" and len(stream.text) > 0 and same >= 20
                table.row(f"{how} in mid-stream, `continue_text`", "the whole text",
                          f"{stream.end}, {seconds:.1f} s, {same} of {len(whole.text)} characters as undisturbed", is_whole)
            engine.process.stop(signal.SIGKILL)
            start_again(engine, gateways)


def zip_same(a, b):
    for one, other in zip(a, b):
        if one != other:
            return
        yield one


def kill(engine, end):
    if end is not None:
        engine.process.tell(end)
        return
    children = subprocess.run(["pgrep", "-g", str(engine.process.process.pid), "-f", engine.CORE], capture_output=True, text=True)
    pids = children.stdout.split()
    if not pids:
        sys.exit(f"its {engine.CORE} is not found")
    subprocess.run(["kill", "-9", *pids], check=True)


def cancels(table, gateway):
    """Clients that leave, one kind at a time: soon nothing of theirs is left, at the engines or at the gateway."""
    def all_quiet():
        return not some_busy() and not any(series(gateway.admin, "keyway_worker_inflight").values())

    def some_busy():
        return any(engine.busy() for engine in gateway.engines)

    def leave(what, streams, events):
        for stream in streams:
            if events:
                stream.read(events)
        begun, _ = within(20, some_busy)
        for stream in streams:
            stream.leave()
        gone, seconds = within(10, all_quiet)
        table.row(f"clients leave {what}", "nothing of theirs is left within 10 s", f"{seconds:.1f} s" if gone else "something is left",
                  begun and gone)

    leave("before the first token", [Stream(gateway.port, 400, tokens=400, seed=nth) for nth in range(8)], 0)
    leave("in mid-stream", [Stream(gateway.port, 20, seed=nth) for nth in range(8)], 5)
    leave("in the queue (80 at engines that take 32 each)", [Stream(gateway.port, 20, seed=nth) for nth in range(80)], 0)
    unstreamed = []
    for nth in range(8):
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        body = {**question(20, LONG, nth), "stream": False}
        connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
        connection.leave = connection.close
        unstreamed.append(connection)
    leave("while an unstreamed answer is computed", unstreamed, 0)


def under_load(table, gateway, args):
    """An engine is killed and comes back while 24 clients ask one thing after the other."""
    over, ends = threading.Event(), []

    def client(nth):
        asked = 0
        while not over.is_set():
            stream = Stream(gateway.port, 30, tokens=40, seed=1000 * nth + asked).read()
            ends.append((stream.end, stream.events))
            asked += 1

    clients = [threading.Thread(target=client, args=(nth,)) for nth in range(24)]
    for one in clients:
        one.start()
    time.sleep(5)
    engine = gateway.engines[0]
    engine.process.stop(signal.SIGKILL)
    time.sleep(5)
    start_again(engine, [])
    time.sleep(5)
    over.set()
    for one in clients:
        one.join()
    bad = [end for end, _ in ends if end != "done"]
    short = [events for end, events in ends if end == "done" and events == 0]
    table.row("an engine is killed and started again under 24 clients, `continue_text`", "no client sees an error",
              f"{len(ends)} answers, {len(bad)} errors {sorted(set(bad))}", not bad and not short)


def main():
    parse = arguments(__doc__)
    parse.add_argument("--only", default="restarts,cancels,breaks,load", help="parts of it")
    parse.add_argument("--breaks", default="all,term,core", help="ways in which an engine ends")
    parse.add_argument("--kind", default="full", help="model, as in tiny_model.py")
    args = parse.parse_args()
    parts, table = args.only.split(","), Table()
    model = tiny_model(args, args.kind)
    engines = [new_engine(args, args.scratch, model, nth, 320) for nth in range(2)]
    plain = Gateway(args, args.scratch, model, engines, "events")
    resumes = Gateway(args, args.scratch, model, engines, "events", "resumes", RESUMES)
    try:
        slow_start(table, plain, engines)
        resumes.start()
        if "restarts" in parts:
            restarts(table, plain, args)
        if "cancels" in parts:
            cancels(table, plain)
        if "breaks" in parts:
            breaks(table, [plain, resumes], args)
        if "load" in parts:
            under_load(table, resumes, args)
    finally:
        for one in [*engines, plain, resumes]:
            if one.process:
                one.process.stop()
    sys.exit(bool(table.failed))


if __name__ == "__main__":
    main()
