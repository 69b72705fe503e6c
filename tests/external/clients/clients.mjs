// The checks of clients for JavaScript. Reads lines of JSON {client, check, base, model, endless}, answers each with a line
// of JSON: {} where all was right, {error} where it was not.
import { createInterface } from "node:readline";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { Output, generateText, isStepCount, streamText, tool } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { z } from "zod";

const QUESTION = "How do I add a worker to the fleet?";
const CITIES = ["Paris", "Rome"];
const SCHEMA = {
  type: "object", properties: { city: { type: "string", enum: CITIES } }, required: ["city"], additionalProperties: false,
};
const Weather = z.object({ city: z.enum(CITIES), warm: z.boolean() });
const CALL_TOKENS = 300, ABORTED_TOKENS = 16000;

function expect(holds, what) {
  if (!holds) throw new Error(`not as expected: ${JSON.stringify(what)}`.slice(0, 400));
}

// That there is a text, unless the answer's one token is its end, or a model is one whose tokens may all be no text.
function expectText(ask, text, tokens, of) {
  expect(text || tokens === 1 || ask.may_be_blank, of);
}

async function raises(kind, call) {
  try {
    await call();
  } catch (error) {
    expect(error.constructor === kind, error.constructor.name);
    return error;
  }
  throw new Error(`no ${kind.name}`);
}

const settings = (baseURL) => ({ baseURL, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: QUESTION }];

const anthropic = (() => {
  const described = { name: "weather", description: "The weather of a city.", input_schema: SCHEMA, strict: true };
  const client = (ask) => new Anthropic(settings(ask.base));
  const call = { max_tokens: CALL_TOKENS, messages, tools: [described] };
  call.tool_choice = { type: "tool", name: "weather", disable_parallel_tool_use: true };

  async function answered(ask, message) {
    const use = message.content.at(-1);
    expect(use.type === "tool_use" && CITIES.includes(use.input.city) && message.stop_reason === "tool_use", message);
    const result = { type: "tool_result", tool_use_id: use.id, content: "It rains." };
    const turns = [...messages, { role: "assistant", content: message.content }, { role: "user", content: [result] }];
    const second = await client(ask).messages.create({
      model: ask.model, max_tokens: 12, messages: turns, tools: [described], tool_choice: { type: "none" },
    });
    expect(second.content.length === 1 && second.content[0].type === "text", second);
  }

  return {
    async create(ask) {
      const message = await client(ask).messages.create({ model: ask.model, max_tokens: 12, messages });
      expectText(ask, message.content[0].text, message.usage.output_tokens, message);
    },
    async stream(ask) {
      let said = "";
      const stream = client(ask).messages.stream({ model: ask.model, max_tokens: 40, messages });
      stream.on("text", (text) => { said += text; });
      const message = await stream.finalMessage();
      const texts = message.content.filter((block) => block.type === "text").map((block) => block.text);
      expect(said === texts.join(""), { said, message });
      expectText(ask, said, message.usage.output_tokens, message);
    },
    tools: async (ask) => answered(ask, await client(ask).messages.create({ model: ask.model, ...call })),
    tools_streamed: async (ask) => answered(ask, await client(ask).messages.stream({ model: ask.model, ...call }).finalMessage()),
    // The client runs the function itself. It asks for a thread, and sends the whole conversation where there is none.
    async tool_runner(ask) {
      const ran = [], prompts = [];
      const run = ({ city }) => { ran.push(city); return "It rains."; };
      const runner = client(ask).beta.messages.toolRunner({
        model: ask.model, ...call, tools: [{ ...described, run, parse: (input) => input }], max_iterations: 2,
      });
      for await (const { usage } of runner)
        prompts.push(usage.input_tokens + (usage.cache_read_input_tokens ?? 0) + (usage.cache_creation_input_tokens ?? 0));
      expect(ran.length === 2 && ran.every((city) => CITIES.includes(city)), ran);
      expect(prompts[1] > prompts[0], prompts);
    },
    async count_tokens(ask) {
      const asked = { model: ask.model, messages, tools: [described] };
      const { usage } = await client(ask).messages.create({ max_tokens: 1, ...asked });
      const prompt = usage.input_tokens + (usage.cache_read_input_tokens ?? 0) + (usage.cache_creation_input_tokens ?? 0);
      expect((await client(ask).messages.countTokens(asked)).input_tokens === prompt, usage);
    },
    async errors(ask) {
      const create = (fields) => () => client(ask).messages.create({ model: ask.model, max_tokens: 1, messages, ...fields });
      const absent = await raises(Anthropic.NotFoundError, create({ model: "nobody" }));
      expect(absent.type === "not_found_error", absent);
      const odd = [{ role: "user", content: [{ type: "sound" }] }];
      for (const fields of [{ max_tokens: 0 }, { messages: odd }]) {
        const error = await raises(Anthropic.BadRequestError, create(fields));
        expect(error.type === "invalid_request_error", error.error);
      }
    },
    async models(ask) {
      const listed = [];
      for await (const model of client(ask).models.list({ limit: 1 })) listed.push(model.id);
      expect(listed.includes(ask.model), listed);
      const { type, _request_id } = await client(ask).models.retrieve(ask.model);
      expect(type === "model" && _request_id, { type, _request_id });
      const error = await raises(Anthropic.NotFoundError, () => client(ask).models.retrieve("nobody"));
      expect(error.type === "not_found_error" && error.requestID, error);
    },
    // Of the gateway whose clients have keys, and may ask once in ten seconds.
    async keys_and_limits(ask) {
      const short = { model: ask.model, max_tokens: 1, messages };
      const asked = (apiKey) => new Anthropic({ ...settings(ask.guarded), apiKey }).messages.create(short);
      await raises(Anthropic.AuthenticationError, () => asked("nobody's"));
      await asked("anthropic-node");
      await raises(Anthropic.RateLimitError, async () => { for (let nth = 0; nth < 5; nth++) await asked("anthropic-node"); });
    },
    async abort(ask) {
      const asked = { model: ask.model, max_tokens: ABORTED_TOKENS, messages, stream: true, ...ask.endless };
      const stream = await client(ask).messages.create(asked);
      for await (const event of stream) if (event.type === "content_block_delta") stream.controller.abort();
    },
  };
})();

const openai = (() => {
  const described = { type: "function", name: "weather", description: "The weather of a city.", parameters: SCHEMA, strict: true };
  const client = (ask) => new OpenAI(settings(`${ask.base}/v1`));
  const call = { input: QUESTION, max_output_tokens: CALL_TOKENS, tools: [described], parallel_tool_calls: false };
  call.tool_choice = { type: "function", name: "weather" };

  async function answered(ask, response) {
    const made = response.output.at(-1);
    expect(made.type === "function_call" && CITIES.includes(JSON.parse(made.arguments).city), response);
    const output = { type: "function_call_output", call_id: made.call_id, output: "It rains." };
    const input = [{ role: "user", content: QUESTION }, ...response.output, output];
    const second = await client(ask).responses.create({
      model: ask.model, input, max_output_tokens: 12, tools: [described], tool_choice: "none", store: false,
    });
    expectText(ask, second.output_text, second.usage.output_tokens, second);
    expect(second.output.every((item) => ["message", "reasoning"].includes(item.type)), second);
  }

  return {
    async create(ask) {
      const response = await client(ask).responses.create({ model: ask.model, input: QUESTION, max_output_tokens: 12 });
      expectText(ask, response.output_text, response.usage.output_tokens, response);
      expect(response.status === "completed" || response.usage.output_tokens === 12, response);
    },
    async stream(ask) {
      let said = "";
      const stream = client(ask).responses.stream({ model: ask.model, input: QUESTION, max_output_tokens: 40 });
      stream.on("response.output_text.delta", (event) => { said += event.delta; expect(event.snapshot === said, event); });
      const response = await stream.finalResponse();
      const texts = response.output.flatMap((item) => item.content ?? []).filter((part) => part.type === "output_text");
      expect(said === texts.map((part) => part.text).join(""), { said, response });
      expectText(ask, said, response.usage.output_tokens, response);
    },
    async parse(ask) {
      const asked = { model: ask.model, input: QUESTION, max_output_tokens: CALL_TOKENS };
      const response = await client(ask).responses.parse({ ...asked, text: { format: zodTextFormat(Weather, "weather") } });
      expect(CITIES.includes(response.output_parsed?.city), response);
    },
    tools: async (ask) => answered(ask, await client(ask).responses.create({ model: ask.model, ...call })),
    tools_streamed: async (ask) => answered(ask, await client(ask).responses.stream({ model: ask.model, ...call }).finalResponse()),
    async previous_response_id(ask) {
      const first = await client(ask).responses.create({ model: ask.model, ...call });
      const input = [{ type: "function_call_output", call_id: first.output.at(-1).call_id, output: "It rains." }];
      const second = await client(ask).responses.create({
        model: ask.model, input, previous_response_id: first.id, max_output_tokens: 12, tools: [described], tool_choice: "none",
      });
      expect(second.previous_response_id === first.id && second.usage.input_tokens > first.usage.input_tokens, second);
    },
    async retrieve_and_delete(ask) {
      const { responses } = client(ask);
      const made = await responses.create({ model: ask.model, input: QUESTION, max_output_tokens: 12 });
      expect((await responses.retrieve(made.id)).output[0].content[0].text === made.output_text, made);
      await responses.delete(made.id);
      await raises(OpenAI.NotFoundError, () => responses.retrieve(made.id));
    },
    async errors(ask) {
      const create = (fields) => () => client(ask).responses.create({ model: ask.model, input: QUESTION, ...fields });
      expect((await raises(OpenAI.NotFoundError, create({ model: "nobody" }))).code === "model_not_found", "the code");
      for (const fields of [{ max_output_tokens: 0 }, { input: [{ type: "sound" }] }])
        expect((await raises(OpenAI.BadRequestError, create(fields))).error.message, "the message");
    },
    // Of the gateway whose clients have keys, and may ask once in ten seconds.
    async keys_and_limits(ask) {
      const short = { model: ask.model, input: QUESTION, max_output_tokens: 1 };
      const asked = (apiKey) => new OpenAI({ ...settings(`${ask.guarded}/v1`), apiKey }).responses.create(short);
      await raises(OpenAI.AuthenticationError, () => asked("nobody's"));
      await asked("openai-node");
      await raises(OpenAI.RateLimitError, async () => { for (let nth = 0; nth < 5; nth++) await asked("openai-node"); });
    },
    async abort(ask) {
      const asked = { model: ask.model, input: QUESTION, max_output_tokens: ABORTED_TOKENS, stream: true, ...ask.endless };
      const stream = await client(ask).responses.create(asked);
      for await (const event of stream) if (event.type === "response.output_text.delta") stream.controller.abort();
    },
  };
})();

// The AI SDK's checks of one provider. It runs the function itself between two steps.
function aiSdk(modelOf) {
  const common = (ask, more) => ({ model: modelOf(ask), prompt: QUESTION, maxRetries: 0, abortSignal: AbortSignal.timeout(120_000), ...more });
  const calling = (ran) => ({
    maxOutputTokens: CALL_TOKENS, stopWhen: isStepCount(2),
    tools: { weather: tool({ description: "The weather of a city.", inputSchema: z.object({ city: z.enum(CITIES) }), strict: true,
      execute: async ({ city }) => { ran.push(city); return "It rains."; } }) },
    toolChoice: { type: "tool", toolName: "weather" },
    prepareStep: ({ stepNumber }) => (stepNumber === 0 ? {} : { toolChoice: "none" }),
  });
  const judge = (ask, steps, ran) => {
    expect(ran.length > 0 && ran.every((city) => CITIES.includes(city)), ran);
    expectText(ask, steps[1]?.text, steps[1]?.usage.outputTokens, steps);
    expect(steps.length === 2 && steps[1].toolCalls.length === 0, steps.map((step) => step.content));
  };
  return {
    async generateText(ask) {
      const result = await generateText(common(ask, { maxOutputTokens: 12 }));
      expectText(ask, result.text, result.usage.outputTokens, result.usage);
      expect(result.finishReason === "stop" || result.usage.outputTokens === 12, result.finishReason);
    },
    async streamText(ask) {
      let said = "", failed, finish;
      const result = streamText(common(ask, { maxOutputTokens: 40, onError: ({ error }) => { failed ??= error; } }));
      for await (const part of result.fullStream) {
        if (part.type === "text-delta") said += part.text;
        if (part.type === "error") failed ??= part.error;
        if (part.type === "finish") finish = part;
      }
      if (failed) throw failed;
      expect(said === (await result.text), said);
      expectText(ask, said, finish?.totalUsage.outputTokens, finish);
    },
    async tools(ask) {
      const ran = [];
      judge(ask, (await generateText(common(ask, calling(ran)))).steps, ran);
    },
    async object(ask) {
      const { output } = await generateText(common(ask, { maxOutputTokens: CALL_TOKENS, output: Output.object({ schema: Weather }) }));
      expect(CITIES.includes(output.city), output);
    },
    async "tools streamed"(ask) {
      const ran = [];
      let failed;
      const result = streamText(common(ask, { ...calling(ran), onError: ({ error }) => { failed ??= error; } }));
      await result.consumeStream({ onError: (error) => { failed ??= error; } });
      if (failed) throw failed;
      judge(ask, await result.steps, ran);
    },
  };
}

const clients = {
  "@anthropic-ai/sdk": anthropic,
  openai,
  "@ai-sdk/openai": aiSdk((ask) => createOpenAI(settings(`${ask.base}/v1`)).responses(ask.model)),
  "@ai-sdk/anthropic": aiSdk((ask) => createAnthropic(settings(`${ask.base}/v1`))(ask.model)),
};

if (process.argv[2] === "list") {
  console.log(JSON.stringify(Object.fromEntries(Object.entries(clients).map(([name, checks]) => [name, Object.keys(checks)]))));
  process.exit(0);
}
console.error = console.warn = () => {};
for await (const line of createInterface({ input: process.stdin })) {
  const ask = JSON.parse(line);
  let answer = {};
  try {
    await clients[ask.client][ask.check](ask);
  } catch (error) {
    answer = { error: `${error?.name ?? typeof error}: ${String(error?.message ?? error).slice(0, 400)}` };
  }
  console.log(JSON.stringify(answer));
}
