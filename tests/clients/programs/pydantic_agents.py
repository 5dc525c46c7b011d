"""pydantic-ai: streamed runs over each of the three APIs."""

from __future__ import annotations

from pydantic_ai import Agent, AgentRunResultEvent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from workplace import INSTRUCTIONS, MODEL, Job


async def _run(job: Job, model: object) -> str:
    agent = Agent(model, instructions=INSTRUCTIONS, tools=[job.read_file, job.edit_file])  # type: ignore[arg-type]
    output = ""
    async with agent.run_stream_events(job.prompt) as events:
        async for event in events:
            if isinstance(event, AgentRunResultEvent):
                output = str(event.result.output)
    return output


async def chat(job: Job) -> str:
    provider = OpenAIProvider(base_url=f"{job.url}/v1", api_key="key")
    return await _run(job, OpenAIChatModel(MODEL, provider=provider))


async def responses(job: Job) -> str:
    provider = OpenAIProvider(base_url=f"{job.url}/v1", api_key="key")
    return await _run(job, OpenAIResponsesModel(MODEL, provider=provider))


async def messages(job: Job) -> str:
    return await _run(job, AnthropicModel(MODEL, provider=AnthropicProvider(base_url=job.url, api_key="key")))
