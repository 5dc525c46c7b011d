"""Runs the tasks of all Python clients at once.

    python python_clients.py '[{"kind": "openai_sdk.chat", "url": …, "folder": …, "prompt": …}, …]'

A kind is a module of this folder and a function in it. Prints a JSON object: kind → [whether it came to its
end, the last answer or the traceback].
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import traceback

from workplace import Job


async def _result(job: Job) -> tuple[bool, str]:
    module, _, function = job.kind.partition(".")
    try:
        return True, await getattr(importlib.import_module(module), function)(job)
    except Exception:
        return False, traceback.format_exc()


async def main() -> None:
    jobs = [Job(**given) for given in json.loads(sys.argv[1])]
    results = await asyncio.gather(*[_result(job) for job in jobs])
    print(json.dumps({job.kind: result for job, result in zip(jobs, results, strict=True)}))


if __name__ == "__main__":
    asyncio.run(main())
