"""Requests to three APIs as agents and other clients write them, in our own words: each construct by itself, and conversations put
together from all of them by chance (a seed)."""

import random

SCHEMA = {"type": "object", "properties": {"path": {"type": "string", "description": "Where it is."}, "lines": {"type": "integer"}},
          "required": ["path"]}
TEXTS = ["Read the notes and tell me what is missing.", "Grüße aus Köln: 3 < 4 & 5 > 2", "", "  blanks around  ", "one\ntwo\n\nthree",
         "{\"json\": [1, 2.5, null]}", "東京 🙂 <|im_start|>", "x" * 300]
SYSTEM = "You help people to keep a garden. Answer in one sentence."
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=8f3a1;"
IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def tool(name, **more):
    return {"name": name, "description": f"Does what {name} says.", "input_schema": SCHEMA, **more}


def messages_bodies(rng, many):
    """Bodies of /v1/messages."""
    def body(messages, **more):
        return {"model": "m", "max_tokens": 8, "messages": messages, **more}

    def text(words, **more):
        return {"type": "text", "text": words, **more}

    def use(call, **given):
        return {"type": "tool_use", "id": call, "name": "read_file", "input": given}

    def result(call, content, **more):
        return {"type": "tool_result", "tool_use_id": call, "content": content, **more}

    user, cached = {"role": "user", "content": "Hello."}, {"cache_control": {"type": "ephemeral"}}
    answered = [user, {"role": "assistant", "content": [text("I look."), use("toolu_1", path="a.txt", lines=3)]}]
    yield body([user])
    yield body([user], system=SYSTEM)
    yield body([user], system=[text(SYSTEM, **cached), text("Be kind.")])
    yield body([user], system=[text(BILLING), text(SYSTEM), text("Be kind.", **cached)])
    yield body([user], system="")
    yield body([user], system=[])
    yield body([{"role": "user", "content": [text("one"), text(""), text("two", **cached)]}])
    yield body([{"role": "user", "content": [text("one", **cached)]}])
    yield body([{"role": "user", "content": []}, user])
    yield body([{"role": "user", "content": [text("")]}, user])
    yield body([user, {"role": "assistant", "content": []}, user])
    yield body([user, {"role": "assistant", "content": ""}, user])
    yield body([user, {"role": "assistant", "content": "Good"}])
    for tools in ([tool("read_file")], [tool("read_file"), tool("write_file", strict=True), tool("late", defer_loading=True)],
                  [{"name": "bare", "input_schema": {"properties": {}}}], [tool("cached", **cached)], []):
        yield body([user], tools=tools)
        yield body([user], system=SYSTEM, tools=tools)
    for choice in ({"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "read_file"}):
        yield body([user], tools=[tool("read_file")], tool_choice=choice)
    for content in ("all of it", [text("first"), text("second")], [], None, "", [text("")],
                    [{"type": "tool_reference", "tool_name": "late"}], [text("see"), {"type": "tool_reference", "tool_name": "late"}]):
        yield body(answered + [{"role": "user", "content": [result("toolu_1", content)]}], tools=[tool("read_file")])
    yield body(answered + [{"role": "user", "content": [result("toolu_1", "no such file", is_error=True), text("and now?")]}])
    yield body(answered + [{"role": "user", "content": [text("before"), result("toolu_1", "x"), text("after")]}])
    two = [user, {"role": "assistant", "content": [use("toolu_1", path="a"), use("toolu_2"), use("toolu_3", path="b", lines=None)]}]
    yield body(two + [{"role": "user", "content": [result("toolu_2", "2"), result("toolu_1", "1"), result("toolu_3", [text("3")])]}])
    thinking = {"type": "thinking", "thinking": "They greet me.", "signature": "c2ln"}
    yield body([user, {"role": "assistant", "content": [thinking, text("Hello!")]}, user])
    yield body([user, {"role": "assistant", "content": [thinking]}, user])
    yield body([user, {"role": "assistant", "content": [thinking, thinking, text("a"), text("b"), use("toolu_1", path="c")]},
                {"role": "user", "content": [result("toolu_1", "d")]}])
    yield body([user, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "AAAA"}, text("Hello!")]}, user])
    yield body([user, {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": ""}, text("Hi")]}, user])
    for how in ({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}):
        yield body([user], thinking=how, max_tokens=2048)
        yield body([user], thinking=how, max_tokens=2048, output_config={"effort": "high"})
        yield body([user], thinking=how, max_tokens=2048, chat_template_kwargs={"enable_thinking": True})
    for effort in ("low", "medium", "high", "xhigh", "max"):
        yield body([user], output_config={"effort": effort})
    yield body([user], output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    yield body([user], chat_template_kwargs={"enable_thinking": False, "reasoning_effort": "low"})
    reminder = {"role": "system", "content": [text("Reminder: 4,000 tokens are left.")]}
    yield body([user, {"role": "assistant", "content": "Hi."}, reminder, user], system=SYSTEM)
    yield body([user, {"role": "assistant", "content": "Hi."}, {"role": "system", "content": "Reminder."}, user])
    yield body([user, {"role": "system", "content": [text(BILLING)]}, user], system=SYSTEM)
    yield body([user, {"role": "system", "content": BILLING + "\nmore"}, user])
    yield body([user, {"role": "system", "content": ""}, user])
    yield body([{"role": "system", "content": "First."}, user])
    added = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "late"}}
    removed = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "read_file"}}
    defined = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool("new_one")}}
    both = [tool("read_file"), tool("late", defer_loading=True)]
    for changes in ([added], [removed], [defined], [added, removed, defined], [removed, defined, removed]):
        yield body([user, {"role": "system", "content": changes}, user], tools=both, system=SYSTEM)
    for pages in (1, 2):
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}}
        yield body([user, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": [text("See.")] + [image] * pages}])
    while many > 0:
        many -= 1
        said, tools, calls = [], [tool(f"tool_{i}") for i in range(rng.randrange(4))], 0
        for turn in range(rng.randrange(1, 7)):
            blocks = [text(rng.choice(TEXTS)) for _ in range(rng.randrange(3))]
            blocks += [result(f"toolu_{i}", rng.choice([rng.choice(TEXTS), [text(rng.choice(TEXTS)), text("end")]])) for i in range(calls)]
            rng.shuffle(blocks)
            said.append({"role": "user", "content": blocks if rng.random() < 0.7 else rng.choice(TEXTS)})
            if rng.random() < 0.2:
                said.append({"role": "system", "content": rng.choice(TEXTS)})
            calls = rng.randrange(3)
            blocks = [dict(thinking, thinking=rng.choice(TEXTS))] if rng.random() < 0.4 else []
            blocks += [text(rng.choice(TEXTS)) for _ in range(rng.randrange(2))]
            blocks += [use(f"toolu_{i}", path=rng.choice(TEXTS), lines=rng.randrange(9)) for i in range(calls)]
            said.append({"role": "assistant", "content": blocks})
        said.append({"role": "user", "content": rng.choice(TEXTS) or "Go on."})
        more = {"system": rng.choice([SYSTEM, [text(BILLING), text(SYSTEM)], ""])} if rng.random() < 0.7 else {}
        yield body(said, tools=tools, **more) if tools else body(said, **more)


def responses_bodies(rng, many):
    """Bodies of /v1/responses."""
    def body(given, **more):
        return {"model": "m", "input": given, **more}

    def by(role, content, **more):
        return {"role": role, "content": content, **more}

    def part(words):
        return {"type": "input_text", "text": words}

    def answer(words, **more):
        return {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
                "content": [{"type": "output_text", "text": words, "annotations": []}], **more}

    def call(number, arguments, **more):
        return {"type": "function_call", "call_id": f"call_{number}", "name": "read_file", "arguments": arguments, **more}

    def output(number, words, **more):
        return {"type": "function_call_output", "call_id": f"call_{number}", "output": words, **more}

    def reasoned(words=None, summary=()):
        content = {} if words is None else {"content": [{"type": "reasoning_text", "text": words}]}
        return {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": s} for s in summary], **content}

    def function(name, **more):
        return {"type": "function", "name": name, "description": f"Does what {name} says.", "parameters": SCHEMA, **more}

    user = by("user", "Hello.")
    yield body("Hello.")
    yield body("Hello.", instructions=SYSTEM)
    yield body("", instructions="")
    yield body([user], instructions=SYSTEM)
    yield body([by("user", [part("one"), part(""), part("two")])])
    yield body([by("user", [part("one")], type="message")])
    yield body([by("system", "S"), by("developer", "D"), user])
    yield body([by("developer", [part("D1"), part("D2")], type="message"), by("user", [part("u")], type="message")], instructions=SYSTEM)
    yield body([user, by("assistant", "Hi."), by("system", "Later."), user])
    yield body([user, answer("Hi."), user])
    yield body([user, answer("Hi.", status="incomplete")])
    yield body([user, answer("Hi.", status="in_progress")])
    yield body([user, by("assistant", [{"type": "output_text", "text": "Hi."}]), user])
    yield body([user, answer("a"), answer("b"), user])
    two_texts = [{"type": "output_text", "text": "first", "annotations": []}, {"type": "output_text", "text": "second", "annotations": []}]
    yield body([user, answer("", content=two_texts), user])
    for arguments in ("{\"path\": \"a.txt\", \"lines\": 3}", "{}", "", "not json", "[1]", "{\"a\": \"é\"}"):
        yield body([user, call(1, arguments), output(1, "done")], tools=[function("read_file")])
    yield body([user, answer("I look."), call(1, "{}"), call(2, "{\"b\": 2}"), output(1, "1"), output(2, "2"), user])
    yield body([user, reasoned("They greet."), answer("Hi."), user])
    yield body([user, reasoned("They greet."), call(1, "{}"), output(1, "x"), reasoned("More."), answer("Done."), user])
    yield body([user, answer("Hi."), reasoned("late"), user])
    yield body([user, reasoned("a"), reasoned("b"), answer("Hi."), user])
    yield body([user, reasoned(None, ["In short."]), answer("Hi."), user])
    yield body([user, reasoned(None), answer("Hi."), user])
    yield body([user, {k: v for k, v in reasoned("no id").items() if k != "id"}, answer("Hi."), user])
    yield body([user, call(1, "{}", namespace="files", id="fc_1", status="completed"), output(1, "x", id="o", status="completed")])
    yield body([user, call(1, "{}"), output(1, [part("one"), part("two")])])
    yield body([user, {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** é\n+a"},
                {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"}], tools=[{"type": "custom", "name": "patch"}])
    space = {"type": "namespace", "name": "files", "description": "Of files.", "tools": [function("open"), function("close", strict=True)]}
    for tools in ([function("read_file")], [function("a", strict=True), function("b", strict=False)], [space], [space, function("c")],
                  [{"type": "custom", "name": "patch", "description": "Applies."}], [{"type": "custom", "name": "patch"}],
                  [{"type": "function", "name": "bare", "parameters": None, "strict": None}],
                  [{"type": "function", "name": "bare", "parameters": {"type": "object", "properties": {}}, "strict": False}],
                  [{"type": "web_search_preview"}], [{"type": "web_search_preview"}, function("read_file")],
                  [function("late", defer_loading=True)], []):
        yield body("Hello.", tools=tools)
        yield body([user], tools=tools, instructions=SYSTEM)
    for choice in ("auto", "none", "required", {"type": "function", "name": "read_file"}):
        yield body("Hello.", tools=[function("read_file")], tool_choice=choice)
    for effort in ("none", "minimal", "low", "medium", "high"):
        yield body("Hello.", reasoning={"effort": effort})
        yield body("Hello.", reasoning={"effort": effort, "summary": "auto"}, chat_template_kwargs={"enable_thinking": True})
    yield body("Hello.", text={"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}})
    yield body("Hello.", text={"verbosity": "low"}, store=False, parallel_tool_calls=False, include=["reasoning.encrypted_content"],
               prompt_cache_key="k", metadata={"user_id": "u"}, max_output_tokens=8)
    yield body([user, answer("Hi."), by("user", [part("See."), {"type": "input_image", "image_url": f"data:image/png;base64,{IMAGE}"}])])
    while many > 0:
        many -= 1
        given, calls = [], 0
        for turn in range(rng.randrange(1, 7)):
            given += [output(100 * turn + i, rng.choice(TEXTS)) for i in range(calls)]
            words = rng.choice(TEXTS)
            given.append(by(rng.choice(["user", "user", "user", "developer", "system"]), rng.choice([words, [part(words), part("end")]])))
            if rng.random() < 0.5:
                given.append(reasoned(rng.choice(TEXTS)))
            if rng.random() < 0.7:
                given.append(answer(rng.choice(TEXTS)) if rng.random() < 0.5 else by("assistant", rng.choice(TEXTS)))
            calls = rng.randrange(3)
            given += [call(100 * turn + 100 + i, rng.choice(["{}", "{\"path\": \"é\", \"lines\": 2}", "broken"])) for i in range(calls)]
        given += [output(100 * turn + 100 + i, rng.choice(TEXTS)) for i in range(calls)]
        given.append(by("user", [part("Go on.")]))
        more = {"instructions": SYSTEM} if rng.random() < 0.6 else {}
        tools = [function(f"tool_{i}") for i in range(rng.randrange(4))]
        yield body(given, **more, **({"tools": tools} if tools else {}))


def chat_bodies(rng, many):
    """Bodies of /v1/chat/completions: what no other suite asks an engine for."""
    def body(messages, **more):
        return {"model": "m", "messages": messages, **more}

    def by(role, content, **more):
        return {"role": role, "content": content, **more}

    def call(number, arguments, name="read_file"):
        return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}

    def function(name, **more):
        return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": SCHEMA, **more}}

    user = by("user", "Hello.")
    yield body([user])
    yield body([by("system", SYSTEM), user])
    yield body([by("system", f"{BILLING}\n{SYSTEM}"), user])
    yield body([by("system", BILLING), user])
    yield body([by("developer", "D"), user])
    yield body([by("system", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), user])
    yield body([by("user", [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, "plain", {"type": "text", "text": "b"}])])
    yield body([user, by("assistant", None, tool_calls=[call(1, "{\"path\": \"a\"}")]), by("tool", "x", tool_call_id="call_1")])
    yield body([user, by("assistant", "", tool_calls=[call(1, "")]), by("tool", [{"type": "text", "text": "p"}], tool_call_id="call_1")])
    for arguments in ("broken", "[1]", "{\"a\": 1.5}", " {} "):
        yield body([user, by("assistant", "t", tool_calls=[call(1, arguments)]), by("tool", "x", tool_call_id="call_1")])
    yield body([user, by("assistant", "t", tool_calls=[]), user])
    yield body([user, by("assistant", "t", reasoning="Why."), user])
    yield body([user, by("assistant", "t", reasoning_content="Why."), user])
    yield body([user, by("assistant", "t", annotations=[], refusal=None, audio=None, extra=1), user])
    yield body([by("user", "a", name="ann"), by("assistant", "b", name="bot"), user])
    for tools in ([function("read_file")], [function("s", strict=True)], [{"type": "function", "function": {"name": "bare"}}],
                  [{"function": {"parameters": SCHEMA, "name": "turned"}, "type": "function"}], [function("x", more="unknown")]):
        yield body([user], tools=tools)
    for effort in ("none", "low", "high"):
        yield body([user], reasoning_effort=effort)
        yield body([user], reasoning_effort=effort, chat_template_kwargs={"enable_thinking": True, "reasoning_effort": "low"})
    yield body([user], chat_template_kwargs={"enable_thinking": False})
    yield body([user, by("assistant", "Go")], add_generation_prompt=False, continue_final_message=True)
    yield body([user], add_generation_prompt=False)
    while many > 0:
        many -= 1
        said = [by("system", SYSTEM)] if rng.random() < 0.5 else []
        for turn in range(rng.randrange(1, 6)):
            words = rng.choice(TEXTS)
            said.append(by("user", rng.choice([words, [{"type": "text", "text": words}, {"type": "text", "text": "end"}]])))
            calls = [call(10 * turn + i, rng.choice(["{}", "{\"path\": \"é\"}"])) for i in range(rng.randrange(3))]
            said.append(by("assistant", rng.choice(TEXTS), **({"tool_calls": calls} if calls else {})))
            said += [by("tool", rng.choice(TEXTS), tool_call_id=one["id"]) for one in calls]
        yield body(said + [user], **({"tools": [function("f")]} if rng.random() < 0.5 else {}))


APIS = {"/v1/messages": messages_bodies, "/v1/responses": responses_bodies, "/v1/chat/completions": chat_bodies}


def bodies(many, seed):
    """All bodies with their paths; `many` by chance of each API."""
    for path, written in APIS.items():
        yield from ((path, body) for body in written(random.Random(seed), many))
