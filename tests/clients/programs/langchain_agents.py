"""LangChain: agents that stream, over chat completions, Responses and Messages."""

from __future__ import annotations

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from workplace import INSTRUCTIONS, MODEL, Job


async def _run(job: Job, model: object) -> str:
    tools = [StructuredTool.from_function(tool) for tool in (job.read_file, job.edit_file)]
    agent = create_agent(model, tools, system_prompt=INSTRUCTIONS)  # type: ignore[arg-type, var-annotated]
    asked = {"messages": [{"role": "user", "content": job.prompt}]}
    last = None
    async for mode, piece in agent.astream(asked, stream_mode=["messages", "values"]):  # type: ignore[call-overload]
        if mode == "values":
            last = piece["messages"][-1]
    return last.text if last is not None else ""


async def chat(job: Job) -> str:
    return await _run(job, ChatOpenAI(model=MODEL, base_url=f"{job.url}/v1", api_key="key", max_retries=0))


async def responses(job: Job) -> str:
    model = ChatOpenAI(
        model=MODEL, base_url=f"{job.url}/v1", api_key="key", max_retries=0, use_responses_api=True
    )
    return await _run(job, model)


async def messages(job: Job) -> str:
    model = ChatAnthropic(model=MODEL, base_url=job.url, api_key="key", max_retries=0, max_tokens=512)
    return await _run(job, model)
