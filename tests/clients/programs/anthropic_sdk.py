"""The anthropic SDK: streams of messages."""

from __future__ import annotations

from anthropic import AsyncAnthropic
from workplace import INSTRUCTIONS, MODEL, TOOLS, Job


async def messages(job: Job) -> str:
    client = AsyncAnthropic(base_url=job.url, api_key="key", max_retries=0)
    tools = [
        {"name": name, "description": about, "input_schema": schema}
        for name, (about, schema) in TOOLS.items()
    ]
    spoken: list = [{"role": "user", "content": job.prompt}]
    while True:
        async with client.messages.stream(
            model=MODEL, max_tokens=512, system=INSTRUCTIONS, messages=spoken, tools=tools
        ) as stream:
            async for _ in stream:
                pass
            message = await stream.get_final_message()
        if message.stop_reason != "tool_use":
            return "".join(block.text for block in message.content if block.type == "text")
        spoken.append({"role": "assistant", "content": message.content})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": str(getattr(job, block.name)(**block.input)),
            }
            for block in message.content
            if block.type == "tool_use"
        ]
        spoken.append({"role": "user", "content": results})
