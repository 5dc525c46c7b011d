"""The openai SDK: streams of chat completions and of responses, with strict tools."""

from __future__ import annotations

import json

from openai import AsyncOpenAI
from workplace import INSTRUCTIONS, MODEL, TOOLS, Job


def _call(job: Job, name: str, arguments: str) -> str:
    return str(getattr(job, name)(**json.loads(arguments)))


async def chat(job: Job) -> str:
    client = AsyncOpenAI(base_url=f"{job.url}/v1", api_key="key", max_retries=0)
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": about, "parameters": schema, "strict": True},
        }
        for name, (about, schema) in TOOLS.items()
    ]
    messages: list = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": job.prompt}]
    while True:
        async with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
            async for _ in stream:
                pass
            message = (await stream.get_final_completion()).choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in message.tool_calls:
            result = _call(job, call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def responses(job: Job) -> str:
    client = AsyncOpenAI(base_url=f"{job.url}/v1", api_key="key", max_retries=0)
    tools = [
        {"type": "function", "name": name, "description": about, "parameters": schema, "strict": True}
        for name, (about, schema) in TOOLS.items()
    ]
    items: list = [{"role": "user", "content": job.prompt}]
    while True:
        async with client.responses.stream(
            model=MODEL, instructions=INSTRUCTIONS, input=items, tools=tools, store=False
        ) as stream:
            async for _ in stream:
                pass
            response = await stream.get_final_response()
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items += [
            item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output
        ]
        for call in calls:
            result = _call(job, call.name, call.arguments)
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
