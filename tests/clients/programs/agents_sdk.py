"""openai-agents: a streamed run over the Responses API."""

from __future__ import annotations

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from workplace import INSTRUCTIONS, MODEL, Job


async def run(job: Job) -> str:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{job.url}/v1", api_key="key", max_retries=0)
    agent = Agent(
        name="clerk",
        instructions=INSTRUCTIONS,
        model=OpenAIResponsesModel(model=MODEL, openai_client=client),
        tools=[function_tool(job.read_file), function_tool(job.edit_file)],
    )
    running = Runner.run_streamed(agent, job.prompt)
    async for _ in running.stream_events():
        pass
    return str(running.final_output)
