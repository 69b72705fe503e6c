"""Requests of `bodies.py` to their prompts, by vLLM's own code and by `gateway/text/examples/prompts.rs`, for each template of a folder.

    python compare.py --templates DIR --model DIR --prompts BINARY [--many N] [--seed N] [--only NAME] [--show N]
    python compare.py --model DIR --write gateway/text/tests/data/api_prompts.jsonl

Needs vLLM; see README.md, run.sh fetches everything. No engine is started: requests are read, turned into chats and rendered by the
classes that its server has (`OnlineRenderer`, `AnthropicServingMessages`), with the tokenizer of a tiny model."""

import argparse
import asyncio
import json
import logging
import os
import pathlib
import subprocess
from collections import Counter

os.environ |= {"VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
               "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}

from bodies import bodies
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer

logging.disable(logging.WARNING)


# Templates whose prompts are known to differ, and why.
KNOWN = {
    "openai-gpt-oss-120b": "vLLM renders gpt-oss without its template",
    "LFM2.5-8B-A1B": "it reads a message's `thinking`, which transformers sets since a release after vLLM's 5.19",
}


class Engine:
    """What vLLM makes of a request with this template."""

    def __init__(self, config, renderer, template):
        self.renderer = OnlineRenderer(config.model_config, renderer, request_logger=None, chat_template=template,
                                       chat_template_content_format="auto", enable_auto_tools=True, tool_parser="hermes")
        self.messages = AnthropicServingMessages.__new__(AnthropicServingMessages)
        self.messages.online_renderer = self.renderer
        self.messages._disabled_thinking_effort = None
        self.merges = AnthropicServingMessages._should_merge_inline_system(self.renderer)

    async def prompt(self, path, body):
        body = json.loads(json.dumps(body))
        if path == "/v1/responses":
            rendered = await self.renderer.render_responses(ResponsesRequest.model_validate(body))
            inputs = None if isinstance(rendered, ErrorResponse) else [rendered.engine_input]
        else:
            if path == "/v1/messages":
                request = AnthropicMessagesRequest.model_validate(body)
                disabled = request.thinking is not None and request.thinking.type == "disabled"
                effort = await self.messages._get_disabled_thinking_effort() if disabled else "none"
                request = AnthropicServingMessages.to_chat_completion_request(request, merge_inline_system=self.merges,
                                                                              disabled_thinking_effort=effort)
            else:
                request = ChatCompletionRequest.model_validate(body)
            rendered = await self.renderer.render_chat(request)
            inputs = None if isinstance(rendered, ErrorResponse) else rendered[1]
        if inputs is None:
            raise ValueError(rendered.error.message)
        return inputs[0]["prompt_token_ids"]


# Templates of our own, for texts that are kept: one that shows all of a message and takes text, one that goes through parts and takes
# the system's words in front alone.
SHOWN = {
    "text": "{% if tools is defined and tools is not none %}{{ tools | tojson }}{% endif %}|{{ enable_thinking }}|{{ reasoning_effort }}"
            "{% for m in messages %}\n<{{ m.role }}{{ m.name }}>{{ m.content }}{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
            "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{{ m.tool_call_id }}{% endfor %}"
            "{% if add_generation_prompt %}\n<assistant>{% endif %}",
    "parts": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('not in front') }}{% endif %}"
             "\n<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}({{ p.text }}{{ p.name }})"
             "{% endfor %}{% endif %}{% endfor %}{{ enable_thinking and reasoning_effort }}",
}


async def write(file, config, renderer, tokenizer):
    """Each body that is not there by chance, and the prompts that vLLM makes of it; null where it refuses it."""
    engines = {name: Engine(config, renderer, template) for name, template in SHOWN.items()}
    with file.open("w") as out:
        print(json.dumps({"templates": SHOWN}), file=out)
        for path, body in bodies(0, 0):
            wanted = {name: await by_vllm(engine, path, body) for name, engine in engines.items()}
            texts = {name: tokenizer.decode(want["ids"]) if "ids" in want else None for name, want in wanted.items()}
            print(json.dumps({"path": path, "body": body, **texts}, ensure_ascii=False), file=out)


async def by_vllm(engine, path, body):
    try:
        return {"ids": await engine.prompt(path, body)}
    except Exception as error:  # what a request or a template may be refused by
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def ours(binary, jobs):
    lines = "".join(json.dumps(job, ensure_ascii=False) + "\n" for job in jobs)
    run = subprocess.run([binary], input=lines.encode(), stdout=subprocess.PIPE, check=True)
    return [json.loads(line) for line in run.stdout.decode().split("\n") if line]


def verdict(want, got, tokenizer):
    if "error" in want:
        return "both refuse" if "error" in got else "refused by vLLM alone"
    if "error" in got:
        return "not known here"
    if "beginning" in got:
        begins = tokenizer.decode(want["ids"]).startswith(got["beginning"])
        return "its beginning" if begins else "DIFFERENT"
    return "equal" if want["ids"] == tokenizer.encode(got["text"], add_special_tokens=False) else "DIFFERENT"


async def main():
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--templates", type=pathlib.Path)
    parse.add_argument("--model", required=True)
    parse.add_argument("--prompts")
    parse.add_argument("--write", type=pathlib.Path, help="write vLLM's prompts of two templates of our own to this file, and end")
    parse.add_argument("--many", type=int, default=150, help="bodies of each API that chance puts together")
    parse.add_argument("--seed", type=int, default=1)
    parse.add_argument("--only", default="", help="templates with this in their name")
    parse.add_argument("--show", type=int, default=20, help="differences to print")
    args = parse.parse_args()
    config = EngineArgs(model=args.model, enforce_eager=True).create_engine_config()
    renderer = renderer_from_config(config)
    tokenizer = renderer.get_tokenizer()
    if args.write:
        return await write(args.write, config, renderer, tokenizer)
    special = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    all_bodies, counts, by_template, shown = list(bodies(args.many, args.seed)), {}, {}, 0
    for file in sorted(args.templates.rglob("*.jinja")):
        if args.only not in file.name:
            continue
        source = file.read_text()
        try:
            engine = Engine(config, renderer, source)
        except Exception as error:
            print(f"{file.stem}: vLLM does not take this template: {error}"[:200])
            continue
        jobs = [{"template": source, "special": special, "path": path, "body": body} for path, body in all_bodies]
        for (path, body), got in zip(all_bodies, ours(args.prompts, jobs), strict=True):
            want = await by_vllm(engine, path, body)
            result = verdict(want, got, tokenizer)
            if result in ("DIFFERENT", "not known here") and file.stem in KNOWN:
                result = "known to differ"
            counts.setdefault(path, Counter())[result] += 1
            by_template.setdefault(file.stem, Counter())[result] += 1
            if result in ("DIFFERENT", "not known here") and shown < args.show:
                shown += 1
                text = want.get("error") or tokenizer.decode(want["ids"])
                print(f"--- {file.stem} {path} {result}\n{json.dumps(body, ensure_ascii=False)}\nvLLM: {text!r}\nhere: {got}")
    print("\n| template | " + " | ".join(names := ["equal", "its beginning", "both refuse", "refused by vLLM alone", "not known here",
                                                "known to differ", "DIFFERENT"]) + " |\n|---" + "|---:" * len(names) + "|")
    for name, counted in by_template.items():
        if counted["DIFFERENT"] or counted["not known here"] or counted["known to differ"]:
            print(f"| {name} | " + " | ".join(str(counted[of]) for of in names) + " |")
    for path, counted in counts.items():
        print(f"| {path} | " + " | ".join(str(counted[of]) for of in names) + " |")
    print(f"{len(by_template)} templates")
    raise SystemExit(any(counted["DIFFERENT"] or counted["not known here"] for counted in counts.values()))


asyncio.run(main())
