"""A sandbox for tests, where this machine can have one, and a look at what is left of it."""

import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from modpo.errors import ToolError
from modpo.programs.tools import PythonSandbox, Tool, ToolResult, as_tool

WALL_S = 30.0  # nothing that ends by itself takes so long, even on a busy machine
HASTY_S = 2.0


def sandbox_or_skip() -> PythonSandbox:
    """A sandbox; it exists only once it has seen, with a bounded number of forks, that limits bind."""
    if sys.platform != "linux" or shutil.which("bwrap") is None:
        pytest.skip("needs Linux and bubblewrap (apt-get install bubblewrap)")
    try:
        return PythonSandbox(wall_s=WALL_S, cpu_s=2)
    except ToolError as error:
        pytest.skip(str(error))


def attempts(box: PythonSandbox) -> Iterator[Tool]:
    """The tool, for a fixture; after each attempt none of its processes is left and the next call works."""
    tool = as_tool(box.python)
    yield tool
    assert jailed() == []
    result = tool.run("print(6 * 7)")
    assert (result.text, result.error) == ("42", False)


def jailed() -> list[str]:
    """Processes of any jail: bubblewrap itself, and what runs the code."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if b"/code.py" in command:
            found.append(command.decode(errors="replace"))
    return found


def run(tool: Tool, code: str) -> ToolResult:
    result = tool.run(textwrap.dedent(code))
    assert result.seconds < WALL_S + 10
    assert len(result.text) < 10_000
    return result
