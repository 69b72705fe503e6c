"""What all clients ask with: one function whose arguments end however little a model understands, and what answers must be."""

import typing

import pydantic

SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}}, "required": ["city"],
          "additionalProperties": False}
CITIES = SCHEMA["properties"]["city"]["enum"]
QUESTION = "How do I add a worker to the fleet?"
RESULT = "It rains."
# Forced calls end within these.
CALL_TOKENS = 300
# An answer that is aborted: far more tokens than are made before the worker hears of it.
ABORTED_TOKENS = 16000


class Weather(pydantic.BaseModel):
    """An answer of a required form."""

    city: typing.Literal["Paris", "Rome"]
    warm: bool


def expect(holds, what):
    if not holds:
        raise AssertionError(str(what)[:300])


def expect_text(ask, text, tokens, of):
    """That there is a text, unless the answer's one token is its end, or a model is one whose tokens may all be no text."""
    expect(text or tokens == 1 or ask.may_be_blank, of)


def raises(kind, call):
    """The error of a call that must fail in this way and no other."""
    try:
        call()
    except kind as error:
        expect(type(error) is kind, f"{type(error).__name__} instead of {kind.__name__}")
        return error
    raise AssertionError(f"no {kind.__name__}")
