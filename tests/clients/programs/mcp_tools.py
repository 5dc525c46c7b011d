"""Records the tools of MCP servers that npm has, for tests/engine/frontend/recorded_tools.

    .clients/venv/bin/python tests/clients/programs/mcp_tools.py FOLDER

FOLDER has the servers in node_modules. To be run by hand: the servers are not among the clients that
`make clients` installs.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from mcp import Client, StdioServerParameters

sys.path.insert(0, str(Path(__file__).parents[2]))
import recorded_tools

SERVERS = {
    "everything": ["@modelcontextprotocol/server-everything/dist/index.js"],
    "filesystem": ["@modelcontextprotocol/server-filesystem/dist/index.js", "/tmp"],
    "github": ["@modelcontextprotocol/server-github/dist/index.js"],
    "memory": ["@modelcontextprotocol/server-memory/dist/index.js"],
    "playwright": ["@playwright/mcp/cli.js"],
    "sequential-thinking": ["@modelcontextprotocol/server-sequential-thinking/dist/index.js"],
}


async def record(name: str, modules: Path, arguments: list[str]) -> None:
    command = StdioServerParameters(command="node", args=[str(modules / arguments[0]), *arguments[1:]])
    async with Client(command) as client:
        tools = (await client.list_tools()).tools
    given = [tool.model_dump(by_alias=True, exclude_none=True) for tool in tools]
    text = recorded_tools.dumped(recorded_tools.reworded(given))
    (recorded_tools.FOLDER / f"mcp-{name}.json").write_text(text)
    print(name, len(tools))


async def main(modules: Path) -> None:
    for name, arguments in SERVERS.items():
        await record(name, modules, arguments)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]).absolute() / "node_modules"))
