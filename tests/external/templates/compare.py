"""Renders real chat templates with transformers and with `gateway/text/examples/render.rs`, and compares the texts.

    python compare.py --templates DIR --render BINARY [--show N] [--only NAME]

Needs transformers. See README.md; run.sh fetches everything."""

import argparse
import datetime
import json
import pathlib
import subprocess
import sys
from collections import Counter

import transformers
from transformers.utils import chat_template_utils
from transformers import PreTrainedTokenizerFast
from tokenizers import Tokenizer, models

from matrix import CASES

NOW = 1_795_176_000  # a Friday noon, UTC
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


class FrozenDatetime(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(NOW, datetime.timezone.utc).replace(tzinfo=None)


def reference(tokenizer, source, case):
    """The text, or the error."""
    try:
        text = tokenizer.apply_chat_template(
            case["messages"],
            chat_template=source,
            tools=case["tools"],
            documents=case["documents"],
            add_generation_prompt=case["add_generation_prompt"],
            continue_final_message=case["continue_final_message"],
            tokenize=False,
            **case["variables"],
        )
        return {"text": text}
    except Exception as error:  # whatever a template may raise
        return {"error": f"{type(error).__name__}: {error}"}


def ours(binary, jobs):
    lines = "".join(json.dumps(job, ensure_ascii=False) + "\n" for job in jobs)
    run = subprocess.run([binary], input=lines.encode(), stdout=subprocess.PIPE, check=True)
    return [json.loads(line) for line in run.stdout.decode().split("\n") if line]


def verdict(want, got):
    if "text" in want and "text" in got:
        return "equal" if want["text"] == got["text"] else "DIFFERENT"
    if "error" in want and "error" in got:
        return "both refuse"
    return "only ours refuses" if "text" in want else "only the reference refuses"


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--templates", type=pathlib.Path, required=True)
    arguments.add_argument("--render", required=True)
    arguments.add_argument("--show", type=int, default=0)
    arguments.add_argument("--only", default="")
    arguments.add_argument("--each", action="store_true", help="one difference per template")
    options = arguments.parse_args()
    chat_template_utils.datetime = FrozenDatetime
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)
    special = tokenizer.special_tokens_map
    names, jobs, wants = [], [], []
    files = sorted(p for p in options.templates.rglob("*.jinja") if options.only in p.name)
    for path in files:
        source = path.read_text(encoding="utf-8")
        for name, case in CASES.items():
            names.append((path.name, name))
            wants.append(reference(tokenizer, source, case))
            jobs.append({"template": source, "special": special, "now": NOW, **case})
    gots = ours(options.render, jobs)
    count, shown, seen = Counter(), 0, set()
    for (file, name), want, got in zip(names, wants, gots, strict=True):
        result = verdict(want, got)
        count[result] += 1
        if result in ("equal", "both refuse") or shown >= options.show or (options.each and file in seen):
            continue
        shown += 1
        seen.add(file)
        print(f"--- {file}: {name}: {result}")
        if "text" in want and "text" in got:
            a, b = want["text"], got["text"]
            at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            print(f"at {at}:\n  want {a[max(0, at - 60):at + 80]!r}\n  got  {b[max(0, at - 60):at + 80]!r}")
        else:
            print(f"  want {str(want)[:300]}\n  got  {str(got)[:300]}")
    print(f"transformers {transformers.__version__}, {len(files)} templates, {len(CASES)} conversations each")
    for result, n in sorted(count.items()):
        print(f"{n:6} {result}")
    faults = len(names) - count["equal"] - count["both refuse"]
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
