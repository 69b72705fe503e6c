"""The checks of OpenAI's Agents SDK and of LangChain's two chat models."""

import asyncio

import agents
import langchain_anthropic
import langchain_core.messages
import langchain_core.tools
import langchain_openai
import openai

from question import CALL_TOKENS, CITIES, QUESTION, RESULT, Weather, expect, expect_text

agents.set_tracing_disabled(True)
# A model that is free again may call once more, and once more.
TURNS_MAX = 16


def agents_of(ask, client, is_responses, asked):
    """One that must hand over, to one that must call, after which its choice is free again."""
    kind = agents.OpenAIResponsesModel if is_responses else agents.OpenAIChatCompletionsModel
    model = kind(model=ask.model, openai_client=client)

    @agents.function_tool
    def weather(city: Weather.model_fields["city"].annotation) -> str:
        """The weather of a city."""
        asked.append(city)
        return RESULT

    def settings(choice):
        return agents.ModelSettings(tool_choice=choice, parallel_tool_calls=False, max_tokens=CALL_TOKENS, store=False)

    # An answer of a form ends, and to this framework one that was cut off is an error.
    expert = agents.Agent(name="Expert", instructions="Say the weather.", model=model, tools=[weather], output_type=Weather,
                          model_settings=settings("weather"))
    return agents.Agent(name="Desk", instructions="Hand over.", model=model, handoffs=[expert],
                        model_settings=settings("transfer_to_expert"))


def judge(result, asked):
    kinds = [item.type for item in result.new_items]
    wanted = ["handoff_call_item", "handoff_output_item", "tool_call_item", "tool_call_output_item"]
    kinds = [kind for kind in kinds if kind != "reasoning_item"]
    expect(kinds[:4] == wanted and kinds[-1] == "message_output_item", kinds)
    expect(result.last_agent.name == "Expert" and asked and set(asked) <= set(CITIES), (result.last_agent.name, asked))
    expect(isinstance(result.final_output, Weather), result.final_output)


def client_of(ask):
    return openai.AsyncOpenAI(base_url=f"{ask.base}/v1", api_key="none", max_retries=0, timeout=120)


def run(is_responses):
    async def check(ask):
        asked = []
        async with client_of(ask) as client:
            judge(await agents.Runner.run(agents_of(ask, client, is_responses, asked), QUESTION, max_turns=TURNS_MAX), asked)

    return lambda ask: asyncio.run(check(ask))


def run_streamed(is_responses):
    async def check(ask):
        asked, kinds = [], set()
        async with client_of(ask) as client:
            result = agents.Runner.run_streamed(agents_of(ask, client, is_responses, asked), QUESTION, max_turns=TURNS_MAX)
            async for event in result.stream_events():
                kinds.add(event.type if event.type != "raw_response_event" else event.data.type)
        expect({"response.output_text.delta", "response.completed", "run_item_stream_event", "agent_updated_stream_event"} <= kinds, kinds)
        judge(result, asked)

    return lambda ask: asyncio.run(check(ask))


@langchain_core.tools.tool
def weather(city: Weather.model_fields["city"].annotation) -> str:
    """The weather of a city."""
    return RESULT


def of_openai(ask, **more):
    return langchain_openai.ChatOpenAI(model=ask.model, base_url=f"{ask.base}/v1", api_key="none", use_responses_api=True, max_retries=0, **more)


def of_anthropic(ask, **more):
    return langchain_anthropic.ChatAnthropic(model=ask.model, base_url=ask.base, api_key="none", max_retries=0, **more)


def invoke(chat_of):
    def check(ask):
        answer = chat_of(ask, max_tokens=12).invoke(QUESTION)
        tokens = answer.usage_metadata["output_tokens"]
        expect(1 <= tokens <= 12, answer)
        expect_text(ask, answer.text, tokens, answer)

    return check


def stream(chat_of):
    def check(ask):
        whole, texts = None, []
        for chunk in chat_of(ask, max_tokens=40).stream(QUESTION):
            whole = chunk if whole is None else whole + chunk
            texts.append(chunk.text)
        expect("".join(texts) == whole.text, (texts, whole))
        expect_text(ask, whole.text, whole.usage_metadata["output_tokens"], whole)

    return check


def tools(chat_of, never):
    def check(ask):
        chat = chat_of(ask, max_tokens=CALL_TOKENS)
        question = langchain_core.messages.HumanMessage(QUESTION)
        first = chat.bind_tools([weather], tool_choice="weather", strict=True, parallel_tool_calls=False).invoke([question])
        expect(first.tool_calls and first.tool_calls[0]["args"]["city"] in CITIES, first)
        result = weather.invoke(first.tool_calls[0])
        second = chat_of(ask, max_tokens=12).bind_tools([weather], tool_choice=never).invoke([question, first, result])
        expect_text(ask, second.text, second.usage_metadata["output_tokens"], second)
        expect(not second.tool_calls, second)

    return check


def structured(chat_of):
    def check(ask):
        answer = chat_of(ask, max_tokens=CALL_TOKENS).with_structured_output(Weather, method="json_schema").invoke(QUESTION)
        expect(isinstance(answer, Weather), answer)

    return check


def goes_on(ask):
    """A conversation that the worker keeps: each turn sends what is new alone."""
    async def check():
        async with client_of(ask) as client:
            model = agents.OpenAIResponsesModel(model=ask.model, openai_client=client)
            settings = agents.ModelSettings(max_tokens=CALL_TOKENS)
            agent = agents.Agent(name="Desk", model=model, model_settings=settings, output_type=Weather)
            first = await agents.Runner.run(agent, QUESTION, auto_previous_response_id=True)
            second = await agents.Runner.run(agent, "And then?", previous_response_id=first.last_response_id)
            before, after = (result.raw_responses[-1].usage for result in (first, second))
            expect(after.input_tokens > before.input_tokens, (before, after))

    asyncio.run(check())


def kept(ask):
    """The same, as LangChain has it."""
    chat = of_openai(ask, max_tokens=12, use_previous_response_id=True)
    question = langchain_core.messages.HumanMessage(QUESTION)
    first = chat.invoke([question])
    second = chat.invoke([question, first, langchain_core.messages.HumanMessage("And then?")])
    expect(second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"], (first, second))


AGENTS = {f"{name} over {what}": kind(is_responses) for what, is_responses in (("Responses", True), ("chat", False))
          for name, kind in (("run", run), ("run_streamed", run_streamed))} | {"previous_response_id": goes_on}
LANGCHAIN_OPENAI = {"invoke": invoke(of_openai), "stream": stream(of_openai), "tools": tools(of_openai, "none"),
                    "structured output": structured(of_openai), "previous_response_id": kept}
LANGCHAIN_ANTHROPIC = {"invoke": invoke(of_anthropic), "stream": stream(of_anthropic), "tools": tools(of_anthropic, {"type": "none"}),
                       "structured output": structured(of_anthropic)}
