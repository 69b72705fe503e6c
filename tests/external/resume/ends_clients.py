"""The Python clients of ends.py: each reads one stream and gives its text, or raises what its library raises."""

import json
import logging
import os
import warnings

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no look at the network

import anthropic
import httpx
import httpx_sse
import litellm
import openai

TIMEOUT_S = float(os.environ.get("ENDS_TIMEOUT_S", "25"))
PATHS = {"chat": "/chat/completions", "completions": "/completions", "responses": "/responses",
         "messages": "/messages"}

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
litellm.suppress_debug_info = True
# litellm asks models that it does not know for a whole response, and makes the stream up.
litellm.register_model({"openai/streamed": {"litellm_provider": "openai", "mode": "responses", "max_tokens": 1000,
                                            "supports_native_streaming": True, "input_cost_per_token": 0.0,
                                            "output_cost_per_token": 0.0}})


def body(api, prompt, model="m"):
    said = {"completions": {"prompt": prompt}, "responses": {"input": prompt}}
    fields = said.get(api) or {"messages": [{"role": "user", "content": prompt}]}
    return {"model": model, "stream": True, **fields, **({"max_tokens": 9} if api == "messages" else {})}


def of_choices(chunks):
    text = ""
    for chunk in chunks:
        for choice in chunk.choices:
            text += (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""
    return text


class Told(Exception):
    """No error of the client's: it hands the API's own event for a failure on to its program, as a typed event."""


def of_response(events):
    text, told = "", None
    for one in events:
        kind = getattr(one.type, "value", one.type)
        text += one.delta if kind == "response.output_text.delta" else ""
        told = kind if kind in ("response.failed", "error") else told
    if told:
        raise Told(told)
    return text


def of_message(events):
    return "".join(one.delta.text for one in events if one.type == "content_block_delta")


def openai_client(api, base, prompt):
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=TIMEOUT_S)
    create = {"chat": client.chat.completions, "completions": client.completions, "responses": client.responses}[api]
    stream = create.create(**body(api, prompt))
    return of_response(stream) if api == "responses" else of_choices(stream)


def anthropic_client(api, base, prompt):
    client = anthropic.Anthropic(base_url=base.removesuffix("/v1"), api_key="none", max_retries=0, timeout=TIMEOUT_S)
    return of_message(client.messages.create(**body(api, prompt)))


def litellm_client(api, base, prompt):
    settings = {"api_base": base, "api_key": "none", "num_retries": 0, "max_retries": 0, "timeout": TIMEOUT_S}
    if api == "responses":
        return of_response(litellm.responses(**body(api, prompt, "openai/streamed"), **settings))
    if api == "completions":
        return of_choices(litellm.text_completion(**body(api, prompt, "text-completion-openai/m"), **settings))
    if api == "messages":
        settings["api_base"] = base.removesuffix("/v1")
    model = "anthropic/m" if api == "messages" else "openai/m"
    return of_choices(litellm.completion(**body(api, prompt, model), **settings))


def httpx_sse_client(api, base, prompt):
    """Events by the standard's rules, as a careful program reads them: an error event, and whether the last one came."""
    text, over = "", False
    with httpx.Client(timeout=TIMEOUT_S) as client:
        with httpx_sse.connect_sse(client, "POST", base + PATHS[api], json=body(api, prompt)) as source:
            for one in source.iter_sse():
                if one.data == "[DONE]":
                    return text
                data = json.loads(one.data)
                if "error" in data or one.event in ("error", "response.failed"):
                    raise RuntimeError(f"error event: {one.data[:200]}")
                over = over or data.get("type") in ("response.completed", "message_stop")
                for choice in data.get("choices", ()):
                    text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                delta = data.get("delta", "")
                text += delta if isinstance(delta, str) else delta.get("text", "")
                if over:
                    return text
    raise RuntimeError("no last event")


CLIENTS = {
    "openai (Python)": (openai_client, ("chat", "completions", "responses")),
    "anthropic (Python)": (anthropic_client, ("messages",)),
    "litellm": (litellm_client, tuple(PATHS)),
    "httpx-sse": (httpx_sse_client, tuple(PATHS)),
}


def read(name, api, base, prompt):
    """What the client makes of one stream: `text` if it ended in peace, `error` if it raised."""
    try:
        return {"text": CLIENTS[name][0](api, base, prompt)}
    except Exception as error:
        kinds, cause = [type(error).__name__], error
        while cause := cause.__cause__ or cause.__context__:
            kinds.append(type(cause).__name__)
        return {"error": type(error).__name__, "message": str(error)[:300], "kinds": kinds}
