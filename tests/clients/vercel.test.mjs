// Vercel's AI SDK against a gateway that serves nano: text, streams, tools, objects, by the three API shapes it knows.
import assert from 'node:assert/strict';
import { describe, test } from 'node:test';

import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

globalThis.AI_SDK_LOG_WARNINGS = false;

const baseURL = `${process.env.GATEWAY_HTTP}/v1`;
const MODEL = 'deepseek-flash';
const SORT = 'Sort these numbers: 42 7 19 3';
const KNOWN = { temperature: 0, maxRetries: 0, maxOutputTokens: 200, timeout: 60_000 };

const compatible = createOpenAICompatible({
  name: 'shoal',
  baseURL,
  apiKey: 'none',
  includeUsage: true,
  supportsStructuredOutputs: true,
});

// For models whose name it does not know the SDK leaves out what was set about reasoning.
async function withoutThinking(url, request) {
  const body = { ...JSON.parse(request.body), reasoning: { effort: 'none' } };
  return fetch(url, { ...request, body: JSON.stringify(body) });
}

const SHAPES = {
  chat: {
    model: compatible(MODEL),
    plain: { seed: 1, providerOptions: { shoal: { thinking: { type: 'disabled' } } } },
    thinking: { seed: 1 },
  },
  responses: {
    model: createOpenAI({ baseURL, apiKey: 'none', fetch: withoutThinking }).responses(MODEL),
    plain: { providerOptions: { openai: { store: false } } },
  },
  messages: {
    model: createAnthropic({ baseURL, apiKey: 'none' })(MODEL),
    plain: { providerOptions: { anthropic: { thinking: { type: 'disabled' }, disableParallelToolUse: true } } },
    // For models whose name it does not know the SDK leaves out that a tool is strict: any arguments may come.
    tools: { add: tool({ description: 'Add two numbers.', inputSchema: z.looseObject({}), execute: async () => 7 }) },
  },
};

const add = tool({
  description: 'Add two numbers.',
  inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
  strict: true,
  execute: async ({ a, b }) => a + b,
});
const Order = z.object({ colour: z.enum(['red', 'green']), count: z.number().int().min(0).max(99) });
// Nano calls what it must, then answers.
const LOOP = {
  prompt: 'Add 3 and 4',
  tools: { add },
  stopWhen: stepCountIs(3),
  prepareStep: async ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? 'required' : 'none' }),
};

for (const [name, { model, plain, tools = LOOP.tools }] of Object.entries(SHAPES)) {
  describe(name, () => {
    const asked = { model, ...KNOWN, ...plain };

    test('a stream is the whole answer in pieces, with its usage', async () => {
      const whole = await generateText({ ...asked, prompt: SORT });
      assert.equal(whole.text, '3 7 19 42');
      assert.equal(whole.finishReason, 'stop');
      const stream = streamText({ ...asked, prompt: SORT, onError() {} });
      const pieces = [];
      for await (const piece of stream.textStream) pieces.push(piece);
      assert.equal(pieces.join(''), whole.text);
      assert.ok(pieces.length > 2);
      assert.equal(await stream.finishReason, 'stop');
      const usage = await stream.usage;
      assert.equal(usage.outputTokens, whole.usage.outputTokens);
      assert.equal(usage.inputTokens, whole.usage.inputTokens);
      assert.ok(usage.outputTokens > 0);
    });

    test('a tool is called, run, and its result answered', async () => {
      const answer = await generateText({ ...asked, ...LOOP, tools });
      assert.equal(answer.steps.length, 2);
      const [called] = answer.steps;
      assert.equal(called.finishReason, 'tool-calls');
      assert.ok(called.toolCalls.length >= 1);
      for (const [index, call] of called.toolCalls.entries()) {
        assert.equal(call.toolName, 'add');
        assert.equal(called.toolResults[index].output, tools === LOOP.tools ? call.input.a + call.input.b : 7);
      }
      assert.ok(answer.text);
    });

    test('a streamed tool call comes in order and goes on', async () => {
      const answer = streamText({ ...asked, ...LOOP, tools, onError() {} });
      const types = [];
      let input = '';
      for await (const part of answer.fullStream) {
        if (part.type === 'error') throw part.error;
        if (part.type === 'tool-input-delta') input += part.delta;
        if (part.type === 'tool-call') {
          assert.deepEqual(JSON.parse(input), part.input);
          input = '';
        }
        if (types.at(-1) !== part.type) types.push(part.type);
      }
      const order = ['start', 'tool-input-start', 'tool-input-delta', 'tool-input-end', 'tool-call', 'text-delta', 'finish'];
      let at = -1;
      for (const type of order) {
        const next = types.indexOf(type, at + 1);
        assert.ok(next > at, `${type} after ${types[at]} in ${types}`);
        at = next;
      }
      assert.equal((await answer.steps).length, 2);
    });

    test('a model that is not there is an error that says so', async () => {
      const wrong = { chat: compatible, responses: createOpenAI({ baseURL, apiKey: 'none' }).responses, messages: createAnthropic({ baseURL, apiKey: 'none' }) };
      await assert.rejects(generateText({ ...asked, model: wrong[name]('nobody'), prompt: SORT }), (error) => {
        assert.ok(APICallError.isInstance(error), `${error}`);
        assert.ok([400, 404].includes(error.statusCode));
        assert.match(error.message, /nobody/);
        assert.equal(error.isRetryable, false);
        return true;
      });
    });
  });
}

for (const name of ['chat', 'responses']) {
  const { model, plain } = SHAPES[name];
  const asked = { model, ...KNOWN, ...plain, prompt: 'An order as json', output: Output.object({ schema: Order }) };

  test(`an object fits its schema, whole and streamed, by ${name}`, async () => {
    const whole = await generateText(asked);
    Order.parse(whole.output);
    const stream = streamText({ ...asked, onError() {} });
    let pieces = 0;
    for await (const _ of stream.partialOutputStream) pieces += 1;
    assert.ok(pieces > 1);
    assert.deepEqual(await stream.output, whole.output);
  });
}

test('thinking is reasoning, streamed or not', async () => {
  const { model, thinking } = SHAPES.chat;
  const whole = await generateText({ model, ...KNOWN, ...thinking, prompt: SORT });
  assert.equal(whole.reasoningText, 'Smallest first: 3.');
  assert.equal(whole.text, '3 7 19 42');
  assert.ok(whole.usage.outputTokenDetails.reasoningTokens > 0);
  const stream = streamText({ model, ...KNOWN, ...thinking, prompt: SORT, onError() {} });
  assert.equal(await stream.text, whole.text);
  assert.equal(await stream.reasoningText, whole.reasoningText);
});

test('an abort in mid-stream ends the stream', async () => {
  const { model, plain } = SHAPES.chat;
  const controller = new AbortController();
  const stream = streamText({
    model,
    ...KNOWN,
    ...plain,
    maxOutputTokens: 4000,
    providerOptions: { shoal: { thinking: { type: 'disabled' }, ignore_eos: true } },
    prompt: SORT,
    abortSignal: controller.signal,
    onError() {},
  });
  const types = [];
  for await (const part of stream.fullStream) {
    types.push(part.type);
    if (part.type === 'text-delta') controller.abort();
  }
  assert.ok(types.includes('abort'), `${types}`);
  assert.ok(!types.includes('finish'), `${types}`);
});
