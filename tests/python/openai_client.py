"""Scenarios of the official openai client against a gateway; run by the end-to-end tests.

Usage: openai_client.py SCENARIO BASE_URL. Exits non-zero, with a traceback, when an expectation fails.
"""

import asyncio
import sys

import openai

# Greedy, since one draw in some hundreds ends the random model's answer before its first character.
GREEDY = {"temperature": 0}
# Long enough that a worker which has it is worth a wait for the answer before.
MESSAGES = [{"role": "user", "content": "What is a KV cache? " * 64}]


def answers(client: openai.OpenAI) -> None:
    """Lists models, answers, streams with usage, and does the same asynchronously."""
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=8, **GREEDY)
    assert answer.choices[0].message.content is not None, answer
    assert answer.usage and answer.usage.prompt_tokens > 8, answer

    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=8, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert any(chunk.choices and chunk.choices[0].delta.content for chunk in chunks), chunks
    usage = chunks[-1].usage
    assert usage and usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens, chunks[-1]

    completion = client.completions.create(model=model, prompt="Once upon a time", max_tokens=4, **GREEDY)
    assert completion.choices[0].finish_reason in ("length", "stop"), completion
    asyncio.run(answers_async(str(client.base_url), model))


async def answers_async(base_url: str, model: str) -> None:
    """Eight at once through the asynchronous client."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        create = client.chat.completions.create
        calls = [create(model=model, messages=MESSAGES, max_tokens=4, **GREEDY) for _ in range(8)]
        for answer in await asyncio.gather(*calls):
            assert answer.choices[0].message.content is not None, answer


def unknown_model(client: openai.OpenAI) -> None:
    """An unknown model raises the client's NotFoundError with the code."""
    try:
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found", error
        assert error.param == "model", error
    else:
        raise AssertionError("no error was raised")


def broken_stream(client: openai.OpenAI) -> None:
    """A stream that breaks raises APIError after the events that came whole."""
    seen = []
    try:
        for chunk in client.chat.completions.create(model="fake-model", messages=MESSAGES, stream=True):
            seen.append(chunk.choices[0].delta.content)
    except openai.APIError as error:
        assert type(error) is openai.APIError, f"not the error event: {error!r}"
    else:
        raise AssertionError("no error was raised")
    assert seen == ["one"], seen


def closed_stream(client: openai.OpenAI) -> None:
    """Leaves after the first event."""
    stream = client.chat.completions.create(model="fake-model", messages=MESSAGES, stream=True)
    assert next(iter(stream)).choices[0].delta.content == "one"
    stream.close()


SCENARIOS = {
    "answers": answers,
    "unknown-model": unknown_model,
    "broken-stream": broken_stream,
    "closed-stream": closed_stream,
}

if __name__ == "__main__":
    name, base_url = sys.argv[1:]
    SCENARIOS[name](openai.OpenAI(base_url=base_url, api_key="none", max_retries=0))
