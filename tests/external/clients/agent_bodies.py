"""Conversations with bodies and headers like those of two coding agents, in our own words: they pass, find their cache, and stay
with their worker.
"""

import http.client
import json
import urllib.parse
import uuid

import zstandard

from question import expect

SESSIONS, TURNS = 3, 3
# An agent asks for as many as a model may say; a random one would say them all.
ANSWER_TOKENS = 24
# Of the prompt before, the share that a turn must find: all but what its answer made different, and blocks' ends.
FOUND_MIN = 0.8
LONG = "Use absolute paths. Read before you write. Say what failed and what you will do about it, and do not guess. " * 4
NAMES = ["Read", "Write", "Edit", "Search", "List", "Run", "Plan", "Ask"]
PARAMETERS = {"type": "object", "properties": {
    "path": {"type": "string", "description": "An absolute path. " + LONG[:200]},
    "lines": {"type": "object", "properties": {"from": {"type": "integer", "minimum": 1}, "to": {"type": "integer"}}},
    "edits": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "minItems": 1},
    "mode": {"type": "string", "enum": ["all", "first"], "default": "all"}}, "required": ["path"], "additionalProperties": False,
    "$schema": "http://json-schema.org/draft-07/schema#"}
LARK = "start: begin hunk+ end\nbegin: \"*** Begin\" LF\nhunk: /.+/ LF\nend: \"*** End\" LF?\n%import common.LF\n"


def send(ask, path, headers, body):
    """The events of a streamed answer, and who gave it."""
    url = urllib.parse.urlsplit(ask.base)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=180)
    data = json.dumps(body).encode()
    if headers.get("content-encoding") == "zstd":
        data = zstandard.compress(data)
    connection.request("POST", path, data, {"content-type": "application/json", "accept": "text/event-stream", **headers})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    expect(answer.status == 200, f"{answer.status} {text}")
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    expect(events, text)
    return events, answer.getheader("x-keyway-worker")


class OverMessages:
    """A session of an agent that speaks Anthropic's API."""

    def __init__(self, ask, nth):
        self.ask, self.id, self.messages = ask, str(uuid.uuid4()), []
        self.nth = nth

    def headers(self):
        return {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14", "x-app": "cli",
                "authorization": "Bearer none", "x-claude-code-session-id": self.id, "user-agent": "claude-cli/2.1 (external, cli)",
                "x-stainless-lang": "js", "x-stainless-retry-count": "0"}

    def body(self, turn):
        mark = {"cache_control": {"type": "ephemeral"}}
        # The line of the bill is another one each time.
        bill = f"x-anthropic-billing-header: cc_version=2.1.{turn}; cc_entrypoint=cli; cch={uuid.uuid4().hex[:5]};"
        system = [{"type": "text", "text": bill}, {"type": "text", "text": "You work in a terminal.", **mark},
                  {"type": "text", "text": LONG * 4, **mark}]
        tools = [{"name": name, "description": f"{name}. {LONG * 3}", "input_schema": PARAMETERS} for name in NAMES]
        tools[-1]["cache_control"] = {"type": "ephemeral"}
        said = [{"type": "text", "text": f"<system-reminder>Today is a day of session {self.nth}.</system-reminder>"}] if turn == 0 else []
        if turn:
            said.append({"tool_use_id": f"toolu_{turn}", "type": "tool_result", "content": [{"type": "text", "text": LONG}], "is_error": turn == 2})
        said.append({"type": "text", "text": f"Mend part {turn} of {self.nth}.", **mark})
        for message in self.messages:
            for block in message["content"]:
                block.pop("cache_control", None)
        self.messages.append({"role": "user", "content": said})
        return {"model": self.ask.model, "messages": self.messages, "system": system, "tools": tools, "metadata": {"user_id": f"u_{self.id}"},
                "max_tokens": ANSWER_TOKENS, "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}, "stream": True,
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}

    def turn(self, turn):
        events, worker = send(self.ask, "/v1/messages?beta=true", self.headers(), self.body(turn))
        expect(events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop", events[-1])
        blocks = []
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append(dict(event["content_block"]))
            if event["type"] == "content_block_delta":
                for name in ("text", "thinking", "signature"):
                    if name in event["delta"]:
                        blocks[-1][name] = (blocks[-1].get(name) or "") + event["delta"][name]
        said = [block for block in blocks if block["type"] == "thinking" or block.get("text")]
        call = {"type": "tool_use", "id": f"toolu_{turn + 1}", "name": "Read", "input": {"path": "/src/lib.rs", "lines": {"from": turn + 1}}}
        self.messages.append({"role": "assistant", "content": [*said, call]})
        usage = [event for event in events if event["type"] == "message_delta"][-1]["usage"]
        found = usage.get("cache_read_input_tokens") or 0
        return usage["input_tokens"] + found + (usage.get("cache_creation_input_tokens") or 0), found, worker


class OverResponses:
    """A session of an agent that speaks OpenAI's Responses and keeps what was said itself."""

    def __init__(self, ask, nth, coding=None, is_plain=False):
        self.ask, self.id, self.nth, self.coding, self.is_plain = ask, str(uuid.uuid4()), nth, coding, is_plain
        self.items = [self.message("developer", f"<permissions>{LONG}</permissions>"), self.message("user", f"<environment>/src/{nth}</environment>")]

    @staticmethod
    def message(role, text):
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    def headers(self):
        more = {"content-encoding": self.coding} if self.coding else {}
        return {"originator": "codex_cli_rs", "session_id": self.id, "conversation_id": self.id, "version": "0.150.0", "authorization": "Bearer none",
                "openai-beta": "responses=experimental", "user-agent": "codex_cli_rs/0.150.0 (Linux; x86_64) terminal", **more}

    def tools(self):
        functions = [{"type": "function", "name": name, "description": f"{name}. {LONG * 3}", "strict": False, "parameters": PARAMETERS}
                     for name in NAMES]
        others = [{"type": "custom", "name": "patch", "description": "Patches.", "format": {"type": "grammar", "syntax": "lark", "definition": LARK}},
                  {"type": "web_search", "external_web_access": False}]
        return functions if self.is_plain else functions + others

    def body(self, turn):
        self.items.append(self.message("user", f"Mend part {turn} of {self.nth}."))
        return {"model": self.ask.model, "instructions": f"You work in a terminal. {LONG * 4}", "input": self.items, "tools": self.tools(),
                "tool_choice": "auto", "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"}, "store": False,
                "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": self.id, "text": {"verbosity": "low"},
                "client_metadata": {"installation": "none"}, "max_output_tokens": ANSWER_TOKENS}

    def turn(self, turn):
        events, worker = send(self.ask, "/v1/responses", self.headers(), self.body(turn))
        expect(events[0]["type"] == "response.created", events[0])
        expect(events[-1]["type"] in ("response.completed", "response.incomplete"), events[-1])
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        for item in done:
            item.pop("status", None)
            item.pop("id", None)
        self.items.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": "Look first."}], "content": None,
                           "encrypted_content": None})
        self.items += [item for item in done if item["type"] == "message"]
        call = {"type": "function_call", "name": "Read", "arguments": "{\"path\": \"/src/lib.rs\"}", "call_id": f"call_{turn}"}
        self.items += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": LONG}]
        if not self.is_plain:
            self.items += [{"type": "custom_tool_call", "name": "patch", "input": "*** Begin\nx\n*** End", "call_id": f"patch_{turn}"},
                           {"type": "custom_tool_call_output", "call_id": f"patch_{turn}", "output": "Done."}]
        usage = events[-1]["response"]["usage"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], worker


def converse(sessions):
    """Turns of all sessions in turn: from the second on each finds its past, where it was."""
    before = [None] * len(sessions)
    for turn in range(TURNS):
        for nth, session in enumerate(sessions):
            tokens, found, worker = session.turn(turn)
            if before[nth]:
                expect(worker == before[nth][1], f"session {nth} went from {before[nth][1]} to {worker} in turn {turn}")
                expect(found >= FOUND_MIN * before[nth][0], f"turn {turn} of {nth}: {found} cached of {tokens}, {before[nth][0]} before")
            before[nth] = (tokens, worker)


def thinking(ask):
    """Thoughts with a budget, as agents bounded them before they left it to the model."""
    session = OverMessages(ask, 9)
    body = session.body(0) | {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1100, "temperature": 1}
    events, _ = send(ask, "/v1/messages?beta=true", session.headers(), body)
    expect(events[-1]["type"] == "message_stop", events[-1])


CLAUDE_CODE = {"conversations": lambda ask: converse([OverMessages(ask, nth) for nth in range(SESSIONS)]), "thinking budget": thinking}
CODEX = {"conversations": lambda ask: converse([OverResponses(ask, nth) for nth in range(SESSIONS)]),
         "functions alone": lambda ask: converse([OverResponses(ask, nth + 10, is_plain=True) for nth in range(SESSIONS)]),
         "compressed": lambda ask: converse([OverResponses(ask, 20, coding="zstd", is_plain=True)])}
