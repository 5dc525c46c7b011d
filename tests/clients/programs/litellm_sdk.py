"""litellm: streams of chat completions by way of `openai/MODEL` and `anthropic/MODEL`."""

from __future__ import annotations

import json

import litellm
from workplace import INSTRUCTIONS, MODEL, TOOLS, Job


async def _run(job: Job, **settings: str) -> str:
    tools = [
        {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}
        for name, (about, schema) in TOOLS.items()
    ]
    messages: list = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": job.prompt}]
    while True:
        chunks = []
        stream = await litellm.acompletion(
            **settings,
            api_key="key",
            messages=messages,
            tools=tools,
            stream=True,
            max_tokens=512,
            max_retries=0,
        )
        async for chunk in stream:
            chunks.append(chunk)
        message = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump())
        for call in message.tool_calls:
            result = getattr(job, call.function.name)(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


async def chat(job: Job) -> str:
    return await _run(job, model=f"openai/{MODEL}", api_base=f"{job.url}/v1")


async def messages(job: Job) -> str:
    return await _run(job, model=f"anthropic/{MODEL}", api_base=job.url)
