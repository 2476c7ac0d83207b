"""Tools of MCP servers (Model Context Protocol), through its official SDK."""

import asyncio
import json
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TextIO, final

from modpo.errors import ToolError
from modpo.programs.tools.arguments import excerpt
from modpo.programs.tools.tool import Tool

_END_S = 10.0


@contextmanager
def mcp_tools(
    *, command: Sequence[str] | None = None, url: str | None = None, timeout_s: float = 30.0
) -> Iterator[list[Tool]]:
    """Use the tools of an MCP server for as long as the block runs.

    One session serves all rollouts: its event loop runs in a thread of its own, and calls may come from any thread at
    the same time. A failed call raises `ToolError` in the tool, so that `Tool.run` makes it data: what the server
    says is wrong, that it gave no answer in time, or that it is gone.

    Args:
        command: starts a server that speaks over its standard input and output, and is ended with the block. It sees
            of the environment only what the SDK passes on (HOME, PATH and the like); `env NAME=value ...` gives more.
        url: of a server that runs and speaks streamable HTTP: ``http://127.0.0.1:8000/mcp``.
        timeout_s: most seconds for one call, and for the server to start.

    Yields:
        A tool for each of the server's, by the server's names.

    Raises:
        ToolError: not one of command and url was given, the SDK is not installed, or there is no such server.
    """
    if (command is None) == (url is None) or isinstance(command, str) or (command is not None and not command):
        raise ToolError(
            f"mcp_tools(command={command!r}, url={url!r}): give one of them, "
            'command=["program", "argument", ...] or url="http://..."'
        )
    session = _Session(command, url, timeout_s)
    try:
        yield [_tool(session, listed) for listed in session.start()]
    finally:
        session.end()


@final
class _Session:
    """A client's session with one server, in a thread with an event loop."""

    def __init__(self, command: Sequence[str] | None, url: str | None, timeout_s: float) -> None:
        self.name = url if command is None else " ".join(command)
        self._command, self._url, self._timeout_s = command, url, timeout_s
        self._loop: asyncio.AbstractEventLoop
        self._life: asyncio.Task[Any] | None = None
        self._closing = asyncio.Event()
        self._ready: Future[tuple[Any, list[Any]]] = Future()
        self._thread = threading.Thread(target=self._work, name=f"mcp-{self.name}", daemon=True)
        self._log: TextIO = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed in `end`

    def start(self) -> list[Any]:
        """Connect; returns the tools as the server lists them."""
        try:
            import mcp  # noqa: F401 - here, where the user sees that it is missing
        except ImportError:
            raise ToolError("tools of MCP servers need the package mcp: pip install 'modpo[tools]'") from None
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        try:
            self._client, listed = self._ready.result(self._timeout_s)
        except TimeoutError:
            raise ToolError(
                f"the MCP server {self.name} did not answer within {self._timeout_s:g} s{self._said()}"
            ) from None
        except Exception as error:  # noqa: BLE001 - whatever kept the SDK from connecting
            raise ToolError(f"no MCP server answers at {self.name}: {_reason(error)}{self._said()}") from None
        return listed

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool from any thread but the session's own; returns the SDK's result."""
        if not self._thread.is_alive():
            raise ToolError(f"{name}: the session with the MCP server {self.name} has ended")
        call = self._client.call_tool(name, dict(arguments))
        try:
            pending = asyncio.run_coroutine_threadsafe(call, self._loop)
        except RuntimeError:  # ended just now
            call.close()
            raise ToolError(f"{name}: the session with the MCP server {self.name} has ended") from None
        try:
            return pending.result(self._timeout_s)
        except TimeoutError:
            pending.cancel()
            raise ToolError(f"{name}: the MCP server {self.name} gave no answer within {self._timeout_s:g} s") from None
        except Exception as error:  # noqa: BLE001 - the SDK, its transport or the server: data all the same
            raise ToolError(f"{name}: the MCP server {self.name} failed: {_reason(error)}") from None

    def end(self) -> None:
        """Leave the session; ends a server that was started."""
        if self._thread.is_alive():
            if self._ready.done() or self._life is None:
                self._loop.call_soon_threadsafe(self._closing.set)
            else:
                self._loop.call_soon_threadsafe(self._life.cancel)  # still waits for the server to answer
            self._thread.join(_END_S)
        self._log.close()

    def _work(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        from mcp import Client

        self._life = asyncio.current_task()
        try:
            async with Client(self._server()) as client:
                self._ready.set_result((client, await _listed(client)))
                await self._closing.wait()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits, or too late to matter
            if not self._ready.done():
                self._ready.set_exception(error)

    def _server(self) -> Any:
        """What the SDK's client connects to."""
        if self._command is None:
            return self._url
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        program, *arguments = self._command
        return stdio_client(StdioServerParameters(command=program, args=arguments), errlog=self._log)

    def _said(self) -> str:
        """The end of what a started server wrote to its standard error."""
        self._log.seek(0)
        text = self._log.read().strip()
        return f"; it said: {text[-500:]}" if text else ""


async def _listed(client: Any) -> list[Any]:
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _tool(session: _Session, listed: Any) -> Tool:
    """Make a tool of one that the server lists."""
    name: str = listed.name

    def call(**arguments: Any) -> str:
        return _text(name, session.call(name, arguments))

    args = _arguments(listed.input_schema)
    return Tool(call, name, listed.description or name, args, dict.fromkeys(args, Any))


def _arguments(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The JSON schema of each argument, without references; a tool of ours requires what has no default."""
    required = set(schema.get("required", ()))
    found = {}
    for name, each in schema.get("properties", {}).items():
        own = _resolved(each, schema) if isinstance(each, Mapping) else {}  # true: anything
        kept = {key: value for key, value in own.items() if key != "default"}
        found[name] = kept if name in required else {"default": None, **own}
    return found


def _resolved(part: Any, root: Mapping[str, Any], within: tuple[str, ...] = ()) -> Any:
    """A part of a schema with what it refers to in its place; what contains itself may be anything in there."""
    if isinstance(part, list):
        return [_resolved(each, root, within) for each in part]
    if not isinstance(part, Mapping):
        return part
    own = {key: _resolved(value, root, within) for key, value in part.items() if key != "$ref"}
    reference = part.get("$ref")
    if not isinstance(reference, str) or reference in within:
        return own
    target: Any = root
    for key in reference.removeprefix("#/").split("/"):
        target = target.get(key, {}) if isinstance(target, Mapping) else {}
    return {**_resolved(target, root, (*within, reference)), **own}


def _text(name: str, result: Any) -> str:
    """What a server answered, as text."""
    parts = [getattr(each, "text", None) or f"[{each.type}]" for each in result.content]
    structured = getattr(result, "structured_content", None)
    text = "\n".join(parts) if parts or structured is None else json.dumps(structured, ensure_ascii=False)
    if result.is_error:
        raise ToolError(text or f"{name} failed and does not say why")
    return text


def _reason(error: BaseException) -> str:
    """Say the innermost of what the SDK's task groups wrap."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return excerpt(f"{type(error).__name__}: {error}", 500, quote=False)
