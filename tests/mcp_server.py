"""A small MCP server for tests; `python -m tests.mcp_server` speaks over stdio."""

import os
import time
from typing import Annotated, Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, WithJsonSchema

server = MCPServer("small")


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers. They are whole."""
    return a + b


@server.tool()
def shout(text: str) -> str:
    """Say it loud."""
    return text.upper()


@server.tool()
def table() -> dict[str, Any]:
    """Give a table."""
    return {"rows": [1, 2]}


@server.tool()
def fail(reason: str) -> str:
    """Fail."""
    raise ToolError(reason)


@server.tool()
def sleep(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "awake"


@server.tool()
def die() -> str:
    """End the server in the middle of a call."""
    os._exit(3)


class Tree(BaseModel):
    size: int
    inner: list["Tree"] = []


Name = Annotated[Any, WithJsonSchema({"type": ["string", "integer", "null"]})]


@server.tool()
def walk(tree: Tree, name: Name = None) -> int:
    """Count all."""
    return tree.size + sum(walk(each) for each in tree.inner)


@server.tool()
def see(name: str) -> str:
    """Read an environment variable."""
    return os.environ.get(name, "not set")


if __name__ == "__main__":
    server.run("stdio")
