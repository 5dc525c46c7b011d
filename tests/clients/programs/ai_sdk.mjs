// Runs the tasks of the AI SDK's clients at once: openai(model), which uses Responses, openai.chat and anthropic.
//
//     node ai_sdk.mjs '[{"kind": "ai_sdk.chat", "url": …, "folder": …, "prompt": …}, …]'
//
// Prints a JSON object: kind → [whether it came to its end, the last answer or the error].
import { createRequire } from "node:module";
import { readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";

// The packages lie in a folder of their own, which NODE_PATH names; `import` does not read that.
const require = createRequire(join(process.env.NODE_PATH, "here.js"));
const { streamText, tool, isStepCount } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { z } = require("zod");

const MODEL = "smollm2";
const INSTRUCTIONS = "You keep the notes of a railway station. Read a file before you edit it.";

function model({ kind, url }) {
  const settings = { baseURL: `${url}/v1`, apiKey: "key" };
  if (kind === "ai_sdk.messages") return createAnthropic(settings)(MODEL);
  const openai = createOpenAI(settings);
  return kind === "ai_sdk.chat" ? openai.chat(MODEL) : openai(MODEL);
}

function tools({ folder }) {
  return {
    read_file: tool({
      description: "Return the text of a file.",
      inputSchema: z.object({ path: z.string() }),
      execute: ({ path }) => readFile(join(folder, path), "utf8"),
    }),
    edit_file: tool({
      description: "Replace a text in a file.",
      inputSchema: z.object({ path: z.string(), old: z.string(), new: z.string() }),
      execute: async ({ path, old, new: replacement }) => {
        const text = await readFile(join(folder, path), "utf8");
        if (text.split(old).length !== 2) return "it must occur once";
        await writeFile(join(folder, path), text.replace(old, replacement));
        return "edited";
      },
    }),
  };
}

async function result(job) {
  try {
    let failure;
    const stream = streamText({
      model: model(job),
      instructions: INSTRUCTIONS,
      prompt: job.prompt,
      tools: tools(job),
      stopWhen: isStepCount(5),
      maxRetries: 0,
      onError: ({ error }) => { failure = error; },
    });
    for await (const _ of stream.textStream);
    if (failure) throw failure;
    return [true, await stream.text];
  } catch (error) {
    return [false, `${error?.stack ?? error} ${error?.responseBody ?? ""}`];
  }
}

const jobs = JSON.parse(process.argv[2]);
const results = await Promise.all(jobs.map(result));
console.log(JSON.stringify(Object.fromEntries(jobs.map((job, index) => [job.kind, results[index]]))));
