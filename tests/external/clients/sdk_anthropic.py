"""The checks of the anthropic package. Each is a function of what is asked, and raises where something is wrong."""

import anthropic

from question import ABORTED_TOKENS, CALL_TOKENS, CITIES, QUESTION, RESULT, SCHEMA, Weather, expect, expect_text, raises

TOOL = {"name": "weather", "description": "The weather of a city.", "input_schema": SCHEMA, "strict": True}
CHOICE = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
MESSAGES = [{"role": "user", "content": QUESTION}]


def client_of(ask):
    # What lacks a field or has one of another type is an error to it.
    return anthropic.Anthropic(base_url=ask.base, api_key="none", max_retries=0, timeout=120, _strict_response_validation=True)


def create(ask):
    message = client_of(ask).messages.create(model=ask.model, max_tokens=12, messages=MESSAGES, system="Be brief.")
    expect(message.content[0].type == "text" and message.role == "assistant", message)
    expect_text(ask, message.content[0].text, message.usage.output_tokens, message)
    expect(message.stop_reason == "end_turn" or (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 12), message)


def stream(ask):
    """The message that the client puts together is what the events say."""
    said, kinds = "", []
    with client_of(ask).messages.stream(model=ask.model, max_tokens=40, messages=MESSAGES) as events:
        for event in events:
            kinds.append(event.type)
            if event.type == "content_block_delta" and event.delta.type == "text_delta":
                said += event.delta.text
        message = events.get_final_message()
    expect(kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds)
    expect(said == "".join(block.text for block in message.content if block.type == "text"), (said, message))
    expect_text(ask, said, message.usage.output_tokens, message)
    expect(message.stop_reason in ("max_tokens", "end_turn"), message)


def call_of(message):
    call = message.content[-1]
    expect(call.type == "tool_use" and call.input.get("city") in CITIES and message.stop_reason == "tool_use", message)
    return call


def answered(ask, message):
    """The second turn: the call's result is sent, and a text comes back."""
    result = {"type": "tool_result", "tool_use_id": call_of(message).id, "content": RESULT}
    turns = [*MESSAGES, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    second = client_of(ask).messages.create(model=ask.model, max_tokens=12, messages=turns, tools=[TOOL], tool_choice={"type": "none"})
    expect([block.type for block in second.content] == ["text"], second)


def tools(ask):
    answered(ask, client_of(ask).messages.create(model=ask.model, max_tokens=CALL_TOKENS, messages=MESSAGES, tools=[TOOL], tool_choice=CHOICE))


def tools_streamed(ask):
    with client_of(ask).messages.stream(model=ask.model, max_tokens=CALL_TOKENS, messages=MESSAGES, tools=[TOOL], tool_choice=CHOICE) as events:
        pieces = [event.partial_json for event in events if event.type == "input_json"]
        message = events.get_final_message()
    expect(pieces, "no input_json events")
    answered(ask, message)


def count_tokens(ask):
    client, asked = client_of(ask), {"model": ask.model, "messages": MESSAGES, "system": "Be brief.", "tools": [TOOL]}
    usage = client.messages.create(max_tokens=1, **asked).usage
    prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    expect(client.messages.count_tokens(**asked).input_tokens == prompt, usage)


def errors(ask):
    client = client_of(ask)
    error = raises(anthropic.NotFoundError, lambda: client.messages.create(model="nobody", max_tokens=1, messages=MESSAGES))
    expect(error.body["error"]["type"] == "not_found_error", error.body)
    odd = [{"role": "user", "content": [{"type": "sound"}]}]
    for fields in ({"max_tokens": 0, "messages": MESSAGES}, {"max_tokens": 1, "messages": odd}):
        error = raises(anthropic.BadRequestError, lambda: client.messages.create(model=ask.model, **fields))
        expect(error.body.get("type") == "error" and error.body["error"]["type"] == "invalid_request_error", error.body)


def models(ask):
    """The list is read a page at a time, and each answer and error has the id by which a log knows it."""
    client = client_of(ask)
    listed = [model.id for model in client.models.list(limit=1)]
    expect(ask.model in listed and len(listed) == len(set(listed)), listed)
    model = client.models.retrieve(ask.model)
    expect(model.type == "model" and model.id == ask.model and model.created_at.year > 1970 and model._request_id, model)
    expect(client.messages.create(model=ask.model, max_tokens=1, messages=MESSAGES)._request_id, "no id")
    error = raises(anthropic.NotFoundError, lambda: client.models.retrieve("nobody"))
    expect(error.body["error"]["type"] == "not_found_error" and error.request_id, error.body)


def keys_and_limits(ask):
    """Of the gateway whose clients have keys, and may ask once in ten seconds."""
    def asked(key):
        client = anthropic.Anthropic(base_url=ask.guarded, api_key=key, max_retries=0)
        return client.messages.create(model=ask.model, max_tokens=1, messages=MESSAGES)

    error = raises(anthropic.AuthenticationError, lambda: asked("nobody's"))
    expect(error.body["error"]["type"] == "authentication_error", error.body)
    asked("anthropic-python")
    error = raises(anthropic.RateLimitError, lambda: [asked("anthropic-python") for _ in range(5)])
    expect(error.body["error"]["type"] == "rate_limit_error" and int(error.response.headers["retry-after"]) > 0, error.body)


def parse(ask):
    message = client_of(ask).messages.parse(model=ask.model, max_tokens=CALL_TOKENS, messages=MESSAGES, output_format=Weather)
    expect(isinstance(message.parsed_output, Weather), message)


def tool_runner(ask):
    """The client runs the function itself. It asks for a thread, and sends the whole conversation where there is none."""
    asked = []

    @anthropic.beta_tool(strict=True, input_schema=SCHEMA)
    def weather(city):
        """The weather of a city."""
        asked.append(city)
        return RESULT

    runner = client_of(ask).beta.messages.tool_runner(model=ask.model, max_tokens=CALL_TOKENS, messages=MESSAGES, tools=[weather],
                                                      tool_choice=CHOICE, max_iterations=2)
    first, second = (message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
                     + (message.usage.cache_creation_input_tokens or 0) for message in runner)
    expect(len(asked) == 2 and set(asked) <= set(CITIES), asked)
    expect(second > first, f"a prompt of {first} tokens, and with the call and its result one of {second}")


def abort(ask):
    with client_of(ask).messages.stream(model=ask.model, max_tokens=ABORTED_TOKENS, messages=MESSAGES,
                                        extra_body=ask.endless) as events:
        for event in events:
            if event.type == "text":
                break


CHECKS = [create, stream, parse, tools, tools_streamed, tool_runner, count_tokens, errors, models, keys_and_limits, abort]
