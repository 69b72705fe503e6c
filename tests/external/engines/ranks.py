"""One vLLM with two data-parallel engines behind one URL: whether conversations stay where their prefix is, what each engine finds is
predicted, and hits are counted by the engine that a request was sent to. See ranks.md."""

import json
import random
import socket
import sys
import time

from fleet import BLOCK_TOKENS, Engine, Gateway, arguments, ask, series, tiny_model
from predictions import Conversation, text, turn

RANKS = 2
BLOCKS = 160


def ports_in_a_row():
    """As many free ports as there are ranks, each behind the one before it: the first of them."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                for more in range(1, RANKS):
                    with socket.socket() as one:
                        one.bind(("127.0.0.1", port + more))
                return port
            except OSError:
                continue


class Rank:
    """One of the engines behind an address, as a gateway names it."""

    def __init__(self, whole, nth):
        self.whole, self.nth, self.name = whole, nth, f"127.0.0.1:{whole.port}@{nth}"

    def counted(self):
        """Tokens that it looked for in its cache and that it found there, by its own count."""
        own = lambda name: sum(value for labels, value in series(self.whole.port, name).items() if f'engine="{self.nth}"' in labels)
        return own("vllm:prefix_cache_queries_total"), own("vllm:prefix_cache_hits_total")


def gateway_of(args, engine, model, by):
    """One before all ranks of an engine, of which it knows the URL alone."""
    table = f'[[worker]]\nurl = "{engine.worker()}"\n'
    gateway = Gateway(args, args.scratch, model, [], by, config=table)
    gateway.engines = [Rank(engine, nth) for nth in range(RANKS)]
    return gateway


def await_ranks(gateway):
    """Until its workers are the ranks, and no more."""
    until, names = time.monotonic() + 90, []
    while names != [rank.name for rank in gateway.engines]:
        if time.monotonic() > until:
            sys.exit(f"the ranks are not found after 90 s: {names}; see {gateway.log}")
        time.sleep(0.2)
        rows = json.loads(ask(gateway.admin, "GET", "/workers")[1])
        names = sorted(row["worker"] for row in rows if row["state"] == "ready")


def matched(choice, worker):
    return next(row["matched_blocks"] for row in choice["workers"] if row["worker"] == worker)


def converse(gateway, args):
    """Of every request its tokens, what was predicted and found, its rank, and whether another one had more of it than that."""
    chance = random.Random(args.seed)
    systems = [text(chance, args.system_words) for _ in range(4)]
    open_ones, rows = [], []
    while len(rows) < args.requests:
        if len(open_ones) < args.at_a_time:
            open_ones.append((Conversation(chance, chance.choice(systems)), args.turns, None))
        one, left, at = open_ones.pop(chance.randrange(len(open_ones)))
        tokens, found = turn(gateway, one, chance.randint(10, 60))
        choice = gateway.decision(len(rows))
        worker = choice["worker"]
        forsaken = at not in (None, worker) and matched(choice, at) > matched(choice, worker)
        rows.append({"tokens": tokens, "predicted": choice["matched_tokens"], "found": found, "worker": worker,
                     "followed": at is not None, "moved": at not in (None, worker), "forsaken": forsaken})
        if left > 1:
            open_ones.append((one, left - 1, worker))
    return rows


def judge(args, by):
    model = tiny_model(args, "full")
    flags = ["--data-parallel-size", str(RANKS), "--api-server-count", str(args.api_servers)]
    engine = Engine(args, args.scratch, model, 0, BLOCKS, flags)
    engine.events, engine.replay = ports_in_a_row(), ports_in_a_row()
    gateway = gateway_of(args, engine, model, by)
    try:
        engine.start()
        engine.await_ready()
        gateway.start()
        await_ranks(gateway)
        before = [rank.counted() for rank in gateway.engines]
        rows = converse(gateway, args)
        after = [rank.counted() for rank in gateway.engines]
        known = {row["worker"]: row["cache_capacity_tokens"] for row in json.loads(ask(gateway.admin, "GET", "/workers")[1])}
    finally:
        for one in (gateway, engine):
            if one.process:
                one.process.stop()
    return [told(rank, [row for row in rows if row["worker"] == rank.name], old, new, known.get(rank.name), by)
            for rank, old, new in zip(gateway.engines, before, after)]


def told(rank, rows, before, after, capacity, by):
    """What there is to say of one rank."""
    slack = 2 * BLOCK_TOKENS if by == "text" else BLOCK_TOKENS
    queried, hit = (new - old for old, new in zip(before, after))
    total = lambda name: sum(row[name] for row in rows)
    within = sum(abs(row["predicted"] - row["found"]) <= slack for row in rows)
    for row in rows:
        if abs(row["predicted"] - row["found"]) > slack:
            print(f"{rank.name}: {row}", file=sys.stderr)
    print(f"| {by} | {rank.nth} | {len(rows)} | {total('followed') - total('moved')} of {total('followed')} | {total('forsaken')} | {within} "
          f"| {total('predicted')} | {total('found')} | {hit:.0f} | {total('tokens')} | {queried:.0f} | {capacity} |", flush=True)
    counts_agree = hit == total("found") > 0 and queried == total("tokens")
    stays = total("forsaken") <= 0.02 * max(1, total("followed"))
    # By text a size is learned too, where more was predicted than found.
    known = by == "text" or capacity == BLOCKS * BLOCK_TOKENS
    return {"requests": len(rows), "within": within, "holds": counts_agree and stays and known}


def main():
    parse = arguments(__doc__)
    parse.add_argument("--by", default="events,text", help="what the gateway predicts from: events,text")
    parse.add_argument("--requests", type=int, default=200)
    parse.add_argument("--turns", type=int, default=6)
    parse.add_argument("--at-a-time", type=int, default=12, help="conversations that take turns")
    parse.add_argument("--system-words", type=int, default=200)
    parse.add_argument("--api-servers", type=int, default=RANKS)
    args = parse.parse_args()
    print("| by | rank | requests | stayed | had more elsewhere | within a block | predicted | reported | its own count | tokens sent "
          "| looked for | size as known |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|", flush=True)
    failed = False
    for by in args.by.split(","):
        ranks = judge(args, by)
        right, requests = (sum(rank[name] for rank in ranks) for name in ("within", "requests"))
        failed |= not all(rank["holds"] for rank in ranks) or requests != args.requests or (by != "text" and right < 0.99 * requests)
    sys.exit(failed)


if __name__ == "__main__":
    main()
