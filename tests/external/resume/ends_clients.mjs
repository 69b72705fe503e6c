// The clients of ends.py for JavaScript. Reads lines of JSON {client, api, base, prompt}, answers each with a line of
// JSON: `text` if the stream ended in peace, `error` if the client raised.
import { createInterface } from "node:readline";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";
import { streamText } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

const TIMEOUT_MS = 1000 * Number(process.env.ENDS_TIMEOUT_S ?? "25");
const settings = (baseURL) => ({ baseURL, apiKey: "none", maxRetries: 0, timeout: TIMEOUT_MS });
const messages = (prompt) => [{ role: "user", content: prompt }];

async function ofChoices(stream) {
  let text = "";
  for await (const chunk of stream)
    for (const choice of chunk.choices ?? []) text += choice.delta?.content ?? choice.text ?? "";
  return text;
}

// No error of the client's: it hands the API's own event for a failure on to its program.
class Told extends Error {}

async function ofEvents(stream, type, textOf) {
  let text = "", told;
  for await (const event of stream) {
    if (event.type === type) text += textOf(event);
    if (["response.failed", "error"].includes(event.type)) told = event.type;
  }
  if (told) throw new Told(told);
  return text;
}

async function openai({ api, base, prompt }) {
  const client = new OpenAI(settings(base));
  const common = { model: "m", stream: true };
  if (api === "chat") return ofChoices(await client.chat.completions.create({ ...common, messages: messages(prompt) }));
  if (api === "completions") return ofChoices(await client.completions.create({ ...common, prompt }));
  const stream = await client.responses.create({ ...common, input: prompt });
  return ofEvents(stream, "response.output_text.delta", (event) => event.delta);
}

async function anthropic({ base, prompt }) {
  const client = new Anthropic(settings(base.replace(/\/v1$/, "")));
  const stream = await client.messages.create({ model: "m", max_tokens: 9, stream: true, messages: messages(prompt) });
  return ofEvents(stream, "content_block_delta", (event) => event.delta.text);
}

// The AI SDK hands errors to onError, or as parts of its full stream; it throws them from none of its iterators.
async function ai(model, { prompt }) {
  let text = "", failed;
  const abortSignal = AbortSignal.timeout(TIMEOUT_MS);
  const result = streamText({ model, prompt, maxRetries: 0, abortSignal, onError: ({ error }) => { failed ??= error; } });
  for await (const part of result.fullStream) {
    if (part.type === "text-delta") text += part.text;
    if (part.type === "error") failed ??= part.error;
    if (part.type === "abort") failed ??= new Error("timeout");
  }
  if (failed) throw failed;
  return text;
}

const clients = {
  "openai (npm)": openai,
  "anthropic (npm)": anthropic,
  "ai + @ai-sdk/openai": (ask) => {
    const provider = createOpenAI(settings(ask.base));
    return ai({ chat: provider.chat, completions: provider.completion, responses: provider.responses }[ask.api]("m"), ask);
  },
  "ai + @ai-sdk/openai-compatible": (ask) => {
    const provider = createOpenAICompatible({ name: "keyway", ...settings(ask.base) });
    return ai(ask.api === "chat" ? provider("m") : provider.completionModel("m"), ask);
  },
  "ai + @ai-sdk/anthropic": (ask) => ai(createAnthropic(settings(ask.base))("m"), ask),
};

console.error = console.warn = () => {};
process.on("unhandledRejection", () => {});
for await (const line of createInterface({ input: process.stdin })) {
  const ask = JSON.parse(line);
  let answer;
  try {
    const hung = new Promise((_, reject) => setTimeout(() => reject(new Error("timeout")), TIMEOUT_MS + 5000).unref());
    answer = { text: await Promise.race([clients[ask.client](ask), hung]) };
  } catch (error) {
    const name = String(error?.name ?? typeof error).replace(/^AI_/, "");
    const own = error?.constructor?.name ?? name;
    const kind = name === "Error" ? own : name;
    answer = { error: kind, message: String(error?.message ?? error).slice(0, 300), kinds: [kind] };
  }
  console.log(JSON.stringify(answer));
}
