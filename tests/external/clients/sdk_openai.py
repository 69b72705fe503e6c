"""The checks of the openai package's Responses. Each is a function of what is asked, and raises where something is wrong."""

import openai

from question import ABORTED_TOKENS, CALL_TOKENS, CITIES, QUESTION, RESULT, SCHEMA, Weather, expect, expect_text, raises

TOOL = {"type": "function", "name": "weather", "description": "The weather of a city.", "parameters": SCHEMA, "strict": True}
CALL = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}, "parallel_tool_calls": False, "max_output_tokens": CALL_TOKENS}


def client_of(ask):
    # What lacks a field or has one of another type is an error to it.
    return openai.OpenAI(base_url=f"{ask.base}/v1", api_key="none", max_retries=0, timeout=120, _strict_response_validation=True)


def create(ask):
    response = client_of(ask).responses.create(model=ask.model, input=QUESTION, instructions="Be brief.", max_output_tokens=12)
    expect_text(ask, response.output_text, response.usage.output_tokens, response)
    is_cut = response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    expect(response.status == "completed" or is_cut and response.usage.output_tokens == 12, response)


def stream(ask):
    """The response that the client puts together is what the events say, and what the last one has."""
    said, kinds, numbers = "", [], []
    with client_of(ask).responses.stream(model=ask.model, input=QUESTION, max_output_tokens=40) as events:
        for event in events:
            kinds.append(event.type)
            numbers.append(event.sequence_number if hasattr(event, "sequence_number") else None)
            if event.type == "response.output_text.delta":
                said += event.delta
                expect(event.snapshot == said, event)
        final = events.get_final_response() if kinds[-1] == "response.completed" else event.response
    expect(kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete"), kinds)
    expect(final.output_text == said, (said, final))
    expect_text(ask, said, final.usage.output_tokens, final)
    numbers = [number for number in numbers if number is not None]
    expect(numbers == sorted(numbers), numbers)


def parse(ask):
    response = client_of(ask).responses.parse(model=ask.model, input=QUESTION, max_output_tokens=CALL_TOKENS, text_format=Weather)
    expect(isinstance(response.output_parsed, Weather), response)


def call_of(response):
    call = response.output[-1]
    expect(call.type == "function_call" and any(city in call.arguments for city in CITIES) and call.call_id, response)
    return call


def answered(ask, response):
    """The second turn: all items so far, and the call's output."""
    output = {"type": "function_call_output", "call_id": call_of(response).call_id, "output": RESULT}
    items = [{"role": "user", "content": QUESTION}, *response.output, output]
    second = client_of(ask).responses.create(model=ask.model, input=items, max_output_tokens=12, tools=[TOOL], tool_choice="none", store=False)
    expect_text(ask, second.output_text, second.usage.output_tokens, second)
    expect(all(item.type in ("message", "reasoning") for item in second.output), second)


def tools(ask):
    answered(ask, client_of(ask).responses.create(model=ask.model, input=QUESTION, **CALL))


def tools_streamed(ask):
    with client_of(ask).responses.stream(model=ask.model, input=QUESTION, **CALL) as events:
        kinds = {event.type for event in events}
        response = events.get_final_response()
    expect({"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds, kinds)
    answered(ask, response)


def previous_response_id(ask):
    client = client_of(ask)
    first = client.responses.create(model=ask.model, input=QUESTION, **CALL)
    output = {"type": "function_call_output", "call_id": call_of(first).call_id, "output": RESULT}
    second = client.responses.create(model=ask.model, input=[output], previous_response_id=first.id, max_output_tokens=12,
                                     tools=[TOOL], tool_choice="none")
    expect(second.previous_response_id == first.id and second.usage.input_tokens > first.usage.input_tokens, (first.usage, second.usage))
    third = client.responses.create(model=ask.model, input="And then?", previous_response_id=second.id, max_output_tokens=12,
                                    tools=[TOOL], tool_choice="none")
    expect(third.usage.input_tokens_details.cached_tokens > 0, third.usage)


def retrieve_and_delete(ask):
    client = client_of(ask)
    made = client.responses.create(model=ask.model, input=QUESTION, max_output_tokens=12)
    expect(client.responses.retrieve(made.id).output_text == made.output_text, made)
    client.responses.delete(made.id)
    raises(openai.NotFoundError, lambda: client.responses.retrieve(made.id))
    unkept = client.responses.create(model=ask.model, input=QUESTION, max_output_tokens=12, store=False)
    raises(openai.NotFoundError, lambda: client.responses.retrieve(unkept.id))


def errors(ask):
    client = client_of(ask)
    error = raises(openai.NotFoundError, lambda: client.responses.create(model="nobody", input=QUESTION))
    expect(error.code == "model_not_found", error.body)
    for fields in ({"input": QUESTION, "max_output_tokens": 0}, {"input": [{"type": "sound"}]}):
        error = raises(openai.BadRequestError, lambda: client.responses.create(model=ask.model, **fields))
        expect(error.body and error.body["message"], error.body)


def keys_and_limits(ask):
    """Of the gateway whose clients have keys, and may ask once in ten seconds."""
    def asked(key):
        client = openai.OpenAI(base_url=f"{ask.guarded}/v1", api_key=key, max_retries=0)
        return client.responses.create(model=ask.model, input=QUESTION, max_output_tokens=1)

    expect(raises(openai.AuthenticationError, lambda: asked("nobody's")).code == "invalid_api_key", "the code")
    asked("openai-python")
    error = raises(openai.RateLimitError, lambda: [asked("openai-python") for _ in range(5)])
    expect(int(error.response.headers["retry-after"]) > 0, error.response.headers)


def retrieve_streamed(ask):
    """Refused: it would be an answer without events."""
    client = client_of(ask)
    made = client.responses.create(model=ask.model, input=QUESTION, max_output_tokens=12)
    raises(openai.BadRequestError, lambda: list(client.responses.retrieve(made.id, stream=True)))


def abort(ask):
    with client_of(ask).responses.create(model=ask.model, input=QUESTION, max_output_tokens=ABORTED_TOKENS, stream=True,
                                         extra_body=ask.endless) as events:
        for event in events:
            if event.type == "response.output_text.delta":
                break


CHECKS = [create, stream, parse, tools, tools_streamed, previous_response_id, retrieve_and_delete,
          retrieve_streamed, errors, keys_and_limits, abort]
