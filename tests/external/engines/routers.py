"""Routers in turn in front of the same real engines: conversations under eviction, several at once. How much of their prompts the
engines find in their caches, by the engines' own count, and how long clients wait for the first token. See routers.md."""

import http.client
import json
import pathlib
import random
import statistics
import sys
import threading
import time

from fleet import MODEL, Gateway, Process, arguments, ask, free_port, new_engine, tiny_model
from predictions import Conversation, text

BLOCKS = 160
READY_S = 60
QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
# Each as shipped. Those that go by a session are told one.
OTHERS = {
    "vllm-router, cache_aware": ("vllm-router", "--policy", "cache_aware"),
    "vllm-router, consistent_hash": ("vllm-router", "--policy", "consistent_hash"),
    "smg, cache_aware": ("smg", "launch", "--backend", "vllm", "--policy", "cache_aware", "--log-level", "warn"),
}
KEYWAY = {
    "keyway, by events": ("events", ""),
    "keyway, by text": ("text", ""),
    "keyway, round robin": ("text", 'policy = "round-robin"\n'),
}
BY_SESSION = {"vllm-router, consistent_hash"}


class Other:
    """Another router, as it is started for the same engines."""

    def __init__(self, args, name, engines):
        program, *options = OTHERS[name]
        self.port, self.log = free_port(), args.scratch / f"{program}.log"
        urls = [engine.worker() for engine in engines]
        self.command = [args.routers / "bin" / program, *options, "--worker-urls", *urls, "--host", "127.0.0.1",
                        "--port", self.port, "--prometheus-port", free_port()]

    def start(self):
        self.process = Process(self.command, self.log)
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            try:
                if ask(self.port, "POST", Conversation.PATH, QUESTION)[0] == 200:
                    return self
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.5)
        self.process.stop()
        sys.exit(f"it does not answer after {READY_S} s: see {self.log}")


def router(args, model, name, engines):
    if name in OTHERS:
        return Other(args, name, engines)
    by, config = KEYWAY[name]
    return Gateway(args, args.scratch, model, engines, by, name.replace(" ", "-").replace(",", ""), config)


class Talk(Conversation):
    """A conversation whose answers come as streams."""

    def __init__(self, chance, systems, turns, nth):
        self.chance = random.Random(f"{chance.random()}")
        super().__init__(self.chance, self.chance.choice(systems))
        self.left, self.name = turns, f"talk-{nth}"

    def turn(self, port, by_session):
        """The seconds to its first token, or what went wrong."""
        body = {**self.next(self.chance.randint(10, 60)), "stream": True}
        headers = {"content-type": "application/json", **({"x-session-id": self.name} if by_session else {})}
        began, first, said, done = time.monotonic(), None, "", False
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            connection.request("POST", self.PATH, json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                return f"{answer.status}: {answer.read(200)!r}"
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    done = True
                    break
                for choice in json.loads(line[6:]).get("choices", []):
                    if choice["delta"].get("content"):
                        first = first or time.monotonic() - began
                        said += choice["delta"]["content"]
            connection.close()
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            return repr(error)
        if first is None or not done:
            return "a stream without an end or a word"
        self.messages.append({"role": "assistant", "content": said})
        self.left -= 1
        return first


class Load:
    """Requests that are due at random times, whatever has been answered; each is the next turn of a conversation that waits for
    no answer."""

    def __init__(self, args, port, by_session, rate):
        self.args, self.port, self.by_session, self.rate = args, port, by_session, rate
        self.chance, self.lock = random.Random(args.seed), threading.Lock()
        self.systems = [text(self.chance, args.system_words) for _ in range(args.systems)]
        self.idle, self.begun, self.told, self.late = [], 0, [], 0
        for _ in range(args.at_a_time):
            self.begin()

    def begin(self):
        self.idle.append(Talk(self.chance, self.systems, self.args.turns, self.begun))
        self.begun += 1

    def run_turn(self, talk):
        seen = talk.turn(self.port, self.by_session)
        with self.lock:
            self.told.append(seen)
            if talk.left > 0 and not isinstance(seen, str):
                self.idle.append(talk)
            else:
                self.begin()

    def run(self, requests):
        """The seconds to each answer's first token, or what went wrong."""
        threads, due = [], time.monotonic()
        for _ in range(requests):
            due += self.chance.expovariate(self.rate)
            time.sleep(max(0, due - time.monotonic()))
            while True:
                with self.lock:
                    if self.idle:
                        talk = self.idle.pop(self.chance.randrange(len(self.idle)))
                        break
                self.late += 1
                time.sleep(0.01)
            threads.append(threading.Thread(target=self.run_turn, args=(talk,)))
            threads[-1].start()
        for one in threads:
            one.join()
        return self.told


def wake(engines):
    """An engine says that its cache is empty with the first step that it takes."""
    for engine in engines:
        engine.forget()
        ask(engine.port, "POST", Conversation.PATH, QUESTION)


def load_of_others():
    """Cores that are used in a second in which the engines are idle."""
    def busy():
        with open("/proc/stat", encoding="ascii") as stat:
            user, nice, system, _, _, irq, soft, *_ = (int(part) for part in stat.readline().split()[1:])
        return (user + nice + system + irq + soft) / 100
    before = busy()
    time.sleep(1)
    return busy() - before


def measure(args, model, name, engines, rate, requests):
    wake(engines)
    others = load_of_others()
    one = router(args, model, name, engines).start()
    try:
        before = [engine.counted() for engine in engines]
        load = Load(args, one.port, name in BY_SESSION, rate)
        told = load.run(requests)
        after = [engine.counted() for engine in engines]
    finally:
        one.process.stop()
    waits = sorted(wait for wait in told if not isinstance(wait, str))
    bad = [wait for wait in told if isinstance(wait, str)]
    for error in bad[:3]:
        print(f"{name}: {error}", file=sys.stderr)
    asked = [b[0] - a[0] for a, b in zip(before, after)]
    hits = sum(b[1] - a[1] for a, b in zip(before, after))
    quantile = lambda part: 1000 * waits[min(len(waits) - 1, int(part * len(waits)))]
    row = {"hits": hits / sum(asked), "p50": quantile(0.5), "p90": quantile(0.9), "mean": 1000 * statistics.mean(waits),
           "most": max(asked) * len(asked) / sum(asked), "others": others, "failed": len(bad), "late": load.late}
    print(f"{name}: {row}", file=sys.stderr, flush=True)
    return row


def capacity(args, model, engines):
    """Requests a second where all of them are due at once."""
    wake(engines)
    one = router(args, model, "keyway, by text", engines).start()
    try:
        began = time.monotonic()
        told = Load(args, one.port, False, 1000).run(args.requests)
        if any(isinstance(wait, str) for wait in told):
            sys.exit(f"requests fail: {told}")
        return args.requests / (time.monotonic() - began)
    finally:
        one.process.stop()


def main():
    parse = arguments(__doc__)
    every = ",".join([*KEYWAY, *OTHERS]).replace(", ", " ")
    parse.add_argument("--only", default=every, help="routers, by their names without commas")
    parse.add_argument("--routers", type=pathlib.Path, required=True, help="virtual environment that has vllm-router and smg")
    parse.add_argument("--engines", type=int, default=3)
    parse.add_argument("--requests", type=int, default=150)
    parse.add_argument("--runs", type=int, default=3)
    parse.add_argument("--render", action="store_true", help="engines render prompts (--enable-scale-out), which vllm-router's cache_aware asks for")
    parse.add_argument("--rate", type=float, default=0, help="requests a second; 0: half of what the engines do")
    parse.add_argument("--turns", type=int, default=6)
    parse.add_argument("--at-a-time", type=int, default=18, help="conversations")
    parse.add_argument("--systems", type=int, default=6, help="texts that conversations begin with")
    parse.add_argument("--system-words", type=int, default=200)
    args = parse.parse_args()
    names = [name for name in [*KEYWAY, *OTHERS] if name.replace(", ", " ") in args.only.split(",")]
    model, rows = tiny_model(args, "full"), {name: [] for name in names}
    flags = ["--enable-scale-out"] if args.render else []
    engines = [new_engine(args, args.scratch, model, nth, BLOCKS, flags) for nth in range(args.engines)]
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.await_ready()
        rate = args.rate or capacity(args, model, engines) / 2
        print(f"{args.engines} engines, {rate:.1f} requests a second\n", flush=True)
        for nth in range(args.runs):
            for name in names[nth:] + names[:nth]:
                rows[name].append(measure(args, model, name, engines, rate, args.requests))
    finally:
        for engine in engines:
            if engine.process:
                engine.process.stop()
    print("| router | engines' hits / queries | each run | TTFT p50 ms | p90 | mean | prompt tokens, most of mean | cores of others "
          "| failed |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    middle = {name: {key: statistics.median(row[key] for row in told) for key in told[0]} for name, told in rows.items()}
    for name in sorted(names, key=lambda name: -middle[name]["hits"]):
        row, each = middle[name], " ".join(f"{row['hits']:.3f}" for row in rows[name])
        waits = " | ".join(f"{row[key]:.0f}" for key in ("p50", "p90", "mean"))
        print(f"| {name} | {row['hits']:.3f} | {each} | {waits} | {row['most']:.2f} | {row['others']:.1f} "
              f"| {sum(row['failed'] for row in rows[name])} |")
    failed = any(row["failed"] for told in rows.values() for row in told)
    knows = min((middle[name]["hits"] for name in ("keyway, by events", "keyway, by text") if name in middle), default=1)
    sys.exit(failed or knows <= middle.get("keyway, round robin", {"hits": 0})["hits"])


if __name__ == "__main__":
    main()
