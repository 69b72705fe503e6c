"""Clients of three vendors against a gateway with workers of ours and with a vLLM: each check once a target. See run.sh."""

import argparse
import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys
import time
import types

import agent_bodies
import frameworks
import question
import sdk_anthropic
import sdk_openai
from stage import target

TARGETS = ("random", "builtin", "vllm", "translated")
# What vLLM offers with a store of its own alone.
KEPT = ("previous_response_id", "retrieve_and_delete", "retrieve_streamed")
HERE = pathlib.Path(__file__).resolve().parent


def by_name(checks):
    return {check.__name__: check for check in checks}


def python_clients():
    """Checks by client and name, with the client's version."""
    version = importlib.metadata.version
    return {
        f"anthropic {version('anthropic')} (PyPI)": by_name(sdk_anthropic.CHECKS),
        f"openai {version('openai')} (PyPI)": by_name(sdk_openai.CHECKS),
        f"openai-agents {version('openai-agents')}": frameworks.AGENTS,
        f"langchain-openai {version('langchain-openai')}": frameworks.LANGCHAIN_OPENAI,
        f"langchain-anthropic {version('langchain-anthropic')}": frameworks.LANGCHAIN_ANTHROPIC,
        "bodies like Claude Code's": agent_bodies.CLAUDE_CODE,
        "bodies like Codex's": agent_bodies.CODEX,
    }


class Node:
    """The clients for JavaScript, in one process."""

    def __init__(self, node, script):
        self.command = [str(node), str(script)]
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.folder = pathlib.Path(script).parent / "node_modules"

    def clients(self):
        listed = json.loads(subprocess.run([*self.command, "list"], capture_output=True, text=True, check=True).stdout)
        return {f"{name} {self.version(name)} (npm)": {check: self.check(name, check) for check in checks} for name, checks in listed.items()}

    def version(self, package):
        return json.loads((self.folder / package / "package.json").read_text())["version"]

    def check(self, client, check):
        def run(ask):
            self.process.stdin.write(json.dumps({"client": client, "check": check, **vars(ask)}) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
            question.expect(answer, "the process of the clients for JavaScript ended")
            if error := json.loads(answer).get("error"):
                raise AssertionError(error)

        return run


def outcome(where, check, name):
    """Nothing where all was right, else what was not."""
    # An answer that goes on is one that a client can leave.
    ask = types.SimpleNamespace(base=where.base, guarded=where.guarded, model=where.model, endless={"ignore_eos": True},
                                may_be_blank=where.is_vllm)
    before = where.finished()
    try:
        check(ask)
        if name == "abort":
            question.expect(where.is_free(), "a worker still generates")
            question.expect(where.finished() == before, "the answer went on to its end")
    except Exception as error:  # whatever a client raises is its row's
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return text.removeprefix("AssertionError: ")[:400]
    return None


def known_faults():
    """By pattern over `target | client | check`: whose fault it is, and what."""
    lines = (HERE / "known.txt").read_text().splitlines()
    return [(re.compile(pattern), why) for pattern, why in (line.split("  ", 1) for line in lines if line and line[0] != "#")]


def table(rows, targets):
    """One line a client: what was done, and how many checks passed at each target of those that were made."""
    print(f"| client | checks | {' | '.join(targets)} |\n|---|---|{'---:|' * len(targets)}")
    for client, checks in rows.items():
        counts = []
        for target_name in targets:
            errors = [cells[target_name] for cells in checks.values() if target_name in cells]
            counts.append(f"{errors.count(None)} of {len(errors)}")
        print(f"| {client} | {', '.join(checks).replace('_', ' ')} | {' | '.join(counts)} |")


def main():
    parse = argparse.ArgumentParser(description=__doc__)
    for name in ("keyway", "worker", "vllm", "scratch", "node", "script"):
        parse.add_argument(f"--{name}", type=pathlib.Path, required=True)
    parse.add_argument("--targets", default=",".join(TARGETS))
    parse.add_argument("--only", default="", help="a regular expression over `client | check`")
    args = parse.parse_args()
    node, began = Node(args.node, args.script), time.monotonic()
    clients, known, used, faults, rows = python_clients() | node.clients(), known_faults(), set(), [], {}
    for name in args.targets.split(","):
        with target(args, name) as where:
            print(f"{name}: {where.version()}", flush=True)
            for client, checks in clients.items():
                for check, run in checks.items():
                    if not re.search(args.only, f"{client} | {check}") or where.is_vllm and check in KEPT:
                        continue
                    error = outcome(where, run, check)
                    at = f"{name} | {client} | {check}"
                    why = next((nth for nth, (pattern, _) in enumerate(known) if pattern.search(at)), None)
                    rows.setdefault(client, {}).setdefault(check, {})[name] = error
                    if error is None:
                        continue
                    print(f"  {at}: {error}\n    {'not known' if why is None else known[why][1]}", flush=True)
                    used.add(why)
                    if why is None:
                        faults.append(f"{at} fails")
    table(rows, args.targets.split(","))
    print(f"{time.monotonic() - began:.0f} s")
    if not args.only and args.targets == ",".join(TARGETS):
        faults += [f"'{pattern.pattern}' is known to fail and passes" for nth, (pattern, _) in enumerate(known) if nth not in used]
    print("\n".join(faults))
    node.process.kill()
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
