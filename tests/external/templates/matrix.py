"""The conversations that every template is rendered with. Own texts; each case is a keyword set for
`apply_chat_template`: messages, tools, documents, flags, variables."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Looks up the weather in a city — today's, or a <coming> day's.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The city's name, e.g. Łódź or 東京"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                "days": {"type": "array", "items": {"type": "integer"}, "description": "Days from now"},
                "precision": {"type": "number", "minimum": 0.5, "maximum": 1e-05},
                "verbose": {"type": "boolean", "default": False, "nullable": True},
            },
            "required": ["city"],
        },
        "return": {"type": "object", "properties": {"t": {"type": "number"}}},
    },
}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Full-text search.\nSecond line.",
        "parameters": {
            "type": "object",
            "properties": {
                "zebra": {"type": ["string", "null"]},
                "apple": {
                    "type": "object",
                    "properties": {"b": {"type": "integer"}, "a": {"type": "string"}},
                    "additionalProperties": False,
                },
                "filter": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
            },
        },
    },
}
NOARGS = {"type": "function", "function": {"name": "ping", "description": "", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [WEATHER, SEARCH, NOARGS]

USER = {"role": "user", "content": "What is 2 + 2?"}
SYSTEM = {"role": "system", "content": "You are brief."}
ODD = {
    "role": "user",
    "content": "  Grüße, \"Łódź\" & <b>東京</b> 👩‍👩‍👧 שלום e\u0301\r\n\tline\u2028two\u00a0 'x' \\n {{ 1 }} <|im_end|>  \n",
}
PARTS = {"role": "user", "content": [{"type": "text", "text": "First part."}, {"type": "text", "text": " Zweiter Teil é."}]}
ANSWER = {"role": "assistant", "content": "It is 4.\n"}
THOUGHT = {"role": "assistant", "reasoning_content": "Two and two…\nmake four.", "content": "4"}
INLINE_THOUGHT = {"role": "assistant", "content": "<think>\nhm, hm\n</think>\n\nFour."}


def call(name, arguments, content=None, i="call_00001", **more):
    message = {"role": "assistant", "tool_calls": [{"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}]}
    if content is not None:
        message["content"] = content
    return {**message, **more}


CALL = call("get_weather", {"unit": "celsius", "city": "Łódź", "days": [1, 2], "precision": 1.0, "verbose": True}, "")
CALL_STR = call("get_weather", '{"unit": "celsius", "city": "Łódź"}', None)
CALL_TEXT = call("search", {"zebra": None, "apple": {"b": 1, "a": "x"}}, "Let me look.", "call_00002")
CALL_THOUGHT = call("search", {"q": "<é>"}, "", "call_00003", reasoning_content="I should search.")
TWO = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call_0000a", "type": "function", "function": {"name": "ping", "arguments": {}}},
        {"id": "call_0000b", "type": "function", "function": {"name": "search", "arguments": {"zebra": "z"}}},
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_00001", "name": "get_weather", "content": '{"t": 21.5, "sky": "klar ☀"}'}
RESULT_2 = {"role": "tool", "tool_call_id": "call_00002", "name": "search", "content": "nothing"}
RESULT_PARTS = {"role": "tool", "tool_call_id": "call_00001", "name": "get_weather", "content": [{"type": "text", "text": "21 °C"}]}
DOCUMENTS = [{"title": "Häuser", "text": "A house is a \"house\"."}, {"doc_id": "7", "title": "T", "text": "Second text"}]


def case(*messages, generate=True, proceed=False, tools=None, documents=None, **variables):
    return {
        "messages": list(messages),
        "add_generation_prompt": generate,
        "continue_final_message": proceed,
        "tools": tools,
        "documents": documents,
        "variables": variables,
    }


CASES = {
    "user": case(USER),
    "user, no generation prompt": case(USER, generate=False),
    "system": case(SYSTEM, USER),
    "developer": case({"role": "developer", "content": "Be brief."}, USER),
    "odd text": case(SYSTEM, ODD),
    "odd system": case({**ODD, "role": "system"}, USER),
    "empty": case({"role": "user", "content": ""}),
    "turns": case(SYSTEM, USER, ANSWER, ODD),
    "long turns": case(USER, ANSWER, USER, ANSWER, USER, ANSWER, USER),
    "ends with the assistant": case(USER, ANSWER, generate=False),
    "two users in a row": case(USER, USER),
    "system late": case(USER, SYSTEM),
    "assistant first": case(ANSWER, USER),
    "parts": case(PARTS),
    "parts everywhere": case({**PARTS, "role": "system"}, PARTS, {**PARTS, "role": "assistant"}, PARTS),
    "image part": case({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}),
    "image url": case({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "text", "text": "What?"}]}),
    "null fields": case({"role": "user", "content": "Hi", "name": None, "tool_calls": None}, {**ANSWER, "tool_calls": None}, USER),
    "named user": case({**USER, "name": "Ann"}, ANSWER, USER),
    "unknown role": case({"role": "critic", "content": "Hm."}),
    "tools": case(USER, tools=TOOLS),
    "tools, system": case(SYSTEM, USER, tools=[WEATHER]),
    "tools, empty list": case(SYSTEM, USER, tools=[]),
    "tools, no arguments": case(USER, tools=[NOARGS]),
    "call and result": case(SYSTEM, USER, CALL, RESULT, tools=TOOLS),
    "call and result, without tools": case(USER, CALL, RESULT),
    "call with text arguments": case(USER, CALL_STR, RESULT, tools=TOOLS),
    "call with content": case(USER, CALL_TEXT, RESULT_2, tools=[SEARCH]),
    "call with reasoning": case(USER, CALL_THOUGHT, RESULT_2, tools=[SEARCH]),
    "two calls": case(USER, TWO, {**RESULT, "tool_call_id": "call_0000a"}, {**RESULT_2, "tool_call_id": "call_0000b"}, tools=TOOLS),
    "several steps": case(SYSTEM, USER, CALL, RESULT, CALL_TEXT, RESULT_2, ANSWER, ODD, tools=TOOLS),
    "ends with a call": case(USER, CALL, generate=False, tools=TOOLS),
    "result parts": case(USER, CALL, RESULT_PARTS, tools=[WEATHER]),
    "reasoning": case(USER, THOUGHT, USER),
    "reasoning last": case(USER, THOUGHT, generate=False),
    "reasoning inline": case(USER, INLINE_THOUGHT, USER),
    "reasoning under its old name": case(USER, {"role": "assistant", "thinking": "Hm.", "content": "4"}, USER),
    "reasoning kept": case(USER, THOUGHT, CALL_THOUGHT, RESULT_2, tools=[SEARCH], preserve_thinking=True, clear_thinking=False),
    "thinking on": case(SYSTEM, USER, enable_thinking=True, thinking=True),
    "thinking off": case(SYSTEM, USER, enable_thinking=False, thinking=False),
    "thinking off, tools": case(USER, enable_thinking=False, tools=TOOLS),
    "effort": case(SYSTEM, USER, reasoning_effort="high", thinking_budget=512),
    "effort low, tools": case(SYSTEM, USER, reasoning_effort="low", tools=TOOLS, builtin_tools=["browser", "python"]),
    "documents": case(SYSTEM, USER, documents=DOCUMENTS),
    "documents and tools": case(USER, documents=DOCUMENTS, tools=TOOLS),
    "citations": case(USER, documents=DOCUMENTS, citation_mode="accurate", controls={"length": "long", "citations": True}),
    "date": case(USER, date_string="01 Jan 2026", today_date="1 Jan", tools_in_user_message=False, tools=[WEATHER]),
    "identity": case(USER, model_identity="I am Keyway.", custom_system="x", bos_token="<BOS>"),
    "continue": case(USER, {"role": "assistant", "content": "The answer is"}, generate=False, proceed=True),
    "continue, blank at the end": case(USER, {"role": "assistant", "content": "The answer is \n"}, generate=False, proceed=True),
    "continue parts": case(USER, {**PARTS, "role": "assistant"}, generate=False, proceed=True),
}
