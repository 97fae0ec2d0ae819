// A tool conversation through one provider of the AI SDK, whole and as a stream. Prints what the SDK made of it.
// usage: node conversation.mjs PROVIDER BASE_URL KEY MODEL    (packages from $GANGLINE_TOOLS/node_modules)
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

globalThis.AI_SDK_LOG_WARNINGS = false;
const require = createRequire(process.env.GANGLINE_TOOLS + "/package.json");
const load = (name) => import(pathToFileURL(require.resolve(name)));
const [provider, baseURL, apiKey, model] = process.argv.slice(2);

const { generateText, streamText, tool, stepCountIs } = await load("ai");
const { z } = await load("zod");

const makers = {
  openai: async () => (await load("@ai-sdk/openai")).createOpenAI({ baseURL, apiKey }).responses(model),
  chat: async () =>
    (await load("@ai-sdk/openai-compatible")).createOpenAICompatible({ name: "gangline", baseURL, apiKey, includeUsage: true })(model),
  anthropic: async () => (await load("@ai-sdk/anthropic")).createAnthropic({ baseURL, apiKey })(model),
  google: async () => (await load("@ai-sdk/google")).createGoogleGenerativeAI({ baseURL, apiKey })(model),
};

const options = (languageModel) => ({
  model: languageModel,
  system: "You mush.",
  prompt: "How far is it?",
  maxRetries: 0,
  stopWhen: stepCountIs(4),
  providerOptions: {
    anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } },
    google: { thinkingConfig: { includeThoughts: true } },
    openai: { forceReasoning: true, reasoningSummary: "auto", store: false, include: ["reasoning.encrypted_content"] },
  },
  tools: {
    measure: tool({
      description: "Measures a way in km.",
      inputSchema: z.object({ from: z.string(), to: z.string() }),
      execute: async ({ from, to }) => ({ way: `${from}-${to}`, km: 42 }),
    }),
  },
});

const told = (steps, text) => ({
  text,
  steps: steps.map((step) => ({
    text: step.text,
    reasoning: step.reasoningText ?? "",
    calls: step.toolCalls.map((call) => ({ name: call.toolName, input: call.input })),
    results: step.toolResults.map((result) => result.output),
    finish: step.finishReason,
    input: step.usage.inputTokens,
    output: step.usage.outputTokens,
  })),
});

const whole = await generateText(options(await makers[provider]()));
const stream = streamText({ ...options(await makers[provider]()), onError: ({ error }) => { throw error; } });
await stream.consumeStream();
console.log(JSON.stringify({
  whole: told(whole.steps, whole.text),
  stream: told(await stream.steps, await stream.text),
}));
