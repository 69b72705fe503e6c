// The official openai package for JavaScript reads one stream; says what it made of it. See run.sh.
import OpenAI from "openai";

const [baseURL, model, prompt, maxTokens] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
let text = "";
try {
  const stream = await client.chat.completions.create({
    model, stream: true, temperature: 0, max_tokens: Number(maxTokens), messages: [{ role: "user", content: prompt }],
  });
  let finish = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    finish = chunk.choices[0]?.finish_reason ?? finish;
  }
  console.log(JSON.stringify({ error: null, text, finish }));
} catch (error) {
  console.log(JSON.stringify({ error: `${error.constructor.name}: ${error.message}`.slice(0, 200), text }));
}
