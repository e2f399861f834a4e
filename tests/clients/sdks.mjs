// The official SDKs for JavaScript against a server: node sdks.mjs URL. Says what went well, one line each, and throws
// at what did not.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const url = process.argv[2];
const model = "tiny";
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "How will the weather be in Paris?" }];
const schema = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Lyon"] }, days: { type: "integer", enum: [1, 2, 3] } },
  required: ["city", "days"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", parameters: schema } }];
const named = { type: "function", function: { name: "weather" } };

function checkForecast(value) {
  assert.deepEqual(Object.keys(value), ["city", "days"]);
  assert.ok(schema.properties.city.enum.includes(value.city) && schema.properties.days.enum.includes(value.days));
}

const checks = {
  async "chat"() {
    const answer = await openai.chat.completions.create({ model, messages, max_tokens: 8 });
    assert.equal(answer.choices.length, 1);
    assert.ok(answer.usage.completion_tokens > 0);
  },
  async "streamed chat"() {
    const runner = openai.chat.completions.stream({
      model, messages, max_tokens: 24, stream_options: { include_usage: true },
    });
    let text = "";
    runner.on("content", (piece) => (text += piece));
    const whole = await runner.finalChatCompletion();
    assert.equal(whole.choices[0].message.content ?? "", text);
    assert.ok(whole.usage.total_tokens > 0);
  },
  async "streamed call"() {
    const runner = openai.chat.completions.stream({ model, messages, tools, tool_choice: named, max_tokens: 400 });
    const call = (await runner.finalChatCompletion()).choices[0].message.tool_calls[0];
    assert.equal(call.function.name, "weather");
    checkForecast(JSON.parse(call.function.arguments));
  },
  async "structured output"() {
    const response_format = { type: "json_schema", json_schema: { name: "forecast", schema, strict: true } };
    const answer = await openai.chat.completions.parse({ model, messages, response_format, max_tokens: 400 });
    checkForecast(answer.choices[0].message.parsed);
  },
  async "response"() {
    const answer = await openai.responses.create({ model, input: "hi", max_output_tokens: 8 });
    const stream = openai.responses.stream({
      model, input: "more", previous_response_id: answer.id, max_output_tokens: 24,
    });
    let text = "";
    for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
    assert.equal((await stream.finalResponse()).output_text, text);
  },
  async "response with a call"() {
    const stream = openai.responses.stream({
      model, input: "hi", max_output_tokens: 400, tool_choice: { type: "function", name: "weather" },
      tools: [{ type: "function", name: "weather", parameters: schema, strict: true }],
    });
    const call = (await stream.finalResponse()).output.find((item) => item.type === "function_call");
    checkForecast(JSON.parse(call.arguments));
  },
  async "OpenAI's errors"() {
    const asked = openai.chat.completions.create({ model: "nope", messages });
    await assert.rejects(asked, (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
  },
  async "message"() {
    const answer = await anthropic.messages.create({ model, messages, max_tokens: 8 });
    assert.equal(answer.role, "assistant");
    const counted = await anthropic.messages.countTokens({ model, messages });
    assert.equal(counted.input_tokens, answer.usage.input_tokens + answer.usage.cache_read_input_tokens);
  },
  async "streamed message"() {
    const stream = anthropic.messages.stream({ model, messages, max_tokens: 24 });
    let text = "";
    stream.on("text", (piece) => (text += piece));
    const whole = await stream.finalMessage();
    assert.equal(whole.content.map((block) => block.text ?? "").join(""), text);
  },
  async "message with a call"() {
    const stream = anthropic.messages.stream({
      model, messages, max_tokens: 400, tool_choice: { type: "tool", name: "weather" },
      tools: [{ name: "weather", input_schema: schema }],
    });
    const whole = await stream.finalMessage();
    assert.equal(whole.stop_reason, "tool_use");
    checkForecast(whole.content.find((block) => block.type === "tool_use").input);
  },
  async "Anthropic's errors"() {
    const asked = anthropic.messages.create({ model: "nope", messages, max_tokens: 8 });
    await assert.rejects(asked, (error) => error instanceof Anthropic.NotFoundError && Boolean(error.requestID));
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(`ok ${name}`);
}
