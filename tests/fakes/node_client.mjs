// The official Node client against a service: completes, streams, chats, cancels, and gets its exceptions.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const body = { model: "fake", prompt: "def f(x):\n    ", max_tokens: 6, temperature: 0 };
const found = {};
found.text = (await client.completions.create(body)).choices[0].text;
found.stream = "";
for await (const event of await client.completions.create({ ...body, stream: true })) found.stream += event.choices[0].text;
const messages = [{ role: "user", content: "u" }];
found.chat = (await client.chat.completions.create({ model: "fake", messages, max_tokens: 6, temperature: 0 })).choices[0].message.content;
found.chatStream = "";
for await (const event of await client.chat.completions.create({ model: "fake", messages, max_tokens: 6, temperature: 0, stream: true })) {
  found.chatStream += event.choices[0].delta.content ?? "";
}
found.errors = [];
for (const wrong of [{ model: "gpt" }, { nonsense: 1 }, { temperature: -1 }]) {
  try {
    await client.completions.create({ ...body, ...wrong });
  } catch (error) {
    found.errors.push([error.constructor.name, error.status, error.param]);
  }
}
const left = await client.completions.create({ ...body, prompt: "cancel me", max_tokens: 400, stream: true });
for await (const _ of left) break; // which drops the connection
if (process.argv[3]) {
  const properties = { city: { type: "string", enum: ["Rome", "Oslo"] } };
  const schema = { type: "object", properties, required: ["city"], additionalProperties: false };
  const tools = [{ type: "function", function: { name: "weather", parameters: schema } }];
  const how = { model: "fake", tool_choice: process.argv[3], parallel_tool_calls: false };
  const choice = (await client.chat.completions.stream({ ...how, messages, tools }).finalChatCompletion()).choices[0];
  const result = { role: "tool", tool_call_id: choice.message.tool_calls[0].id, content: "sunny" };
  const after = [...messages, choice.message, result];
  found.after = (await client.chat.completions.create({ model: "fake", messages: after, tools, tool_choice: "none", max_tokens: 8 })).usage.completion_tokens;
  const response = await client.responses
    .stream({ ...how, input: "u", store: false, tools: [{ type: "function", name: "weather", parameters: schema, strict: false }] })
    .finalResponse();
  found.calls = [
    choice.finish_reason,
    choice.message.tool_calls.map((call) => [call.function.name, call.function.arguments]),
    response.output.filter((item) => item.type === "function_call").map((item) => [item.name, item.arguments]),
  ];
}
console.log(JSON.stringify(found));
