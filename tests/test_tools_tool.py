"""Tools: what is made of functions, how results and failures become data."""

import asyncio
import copy
import subprocess
import sys
import threading
from contextvars import ContextVar
from typing import Any

import dspy
import pytest
from dspy.utils.dummies import DummyLM
from pydantic import BaseModel

from modpo.errors import ToolError
from modpo.programs.tools import Tool, as_tool
from tests.small_tools import echo, now, pick, repeat, total

MARK: ContextVar[str] = ContextVar("MARK", default="nothing")


class Point(BaseModel):
    x: int
    y: int = 3


class Tree(BaseModel):
    inner: list["Tree"] = []


async def later(text: str) -> str:
    """Say it later."""
    await asyncio.sleep(0)
    return text


def test_a_function_describes_itself() -> None:
    tool = as_tool(echo, examples=[({"text": "hi"}, "hi")])
    assert isinstance(tool, dspy.Tool)
    assert tool.describe() == "echo(text: string) -> what was said: Say it back.\nExample: hi -> hi"
    assert as_tool(tool) is tool
    assert as_tool(repeat).describe() == (
        'repeat(text: string, times: integer, sep: string = "-") -> string: Repeat a text.'
    )
    assert as_tool(now).describe() == "now() -> string: Say when."
    assert as_tool(pick).describe() == "pick(way: 'up' or 'down') -> string: Pick a way."
    assert as_tool(total).describe() == "total(numbers: array of integer) -> integer: Add numbers."


def test_a_function_describes_what_lies_inside_its_inputs() -> None:
    def draw(line: list[Point], start: Point | None = None, label: dict[str, str] | None = None) -> str:
        """Draw."""
        return str(line)

    assert as_tool(draw).describe() == (
        "draw(line: array of {x: integer, y: integer = 3}, start: null or {x: integer, y: integer = 3} = null, "
        "label: null or object = null) -> string: Draw."
    )
    assert as_tool(draw).run('[{"x": 1}]').text == "[Point(x=1, y=3)]"


def test_a_tool_of_dspy_keeps_what_it_says() -> None:
    tool = as_tool(dspy.Tool(repeat, name="again", desc="Say again. Long story."))
    assert tool.describe() == 'again(text: string, times: integer, sep: string = "-") -> string: Say again.'
    assert tool.run('{"text": "a", "times": 2}').text == "a-a"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (None, ""),
        (7, "7"),
        (True, "true"),
        ({"a": [1, "é"]}, '{"a": [1, "é"]}'),
        ((1, 2), "[1, 2]"),
        (b"\xffa", "\ufffda"),
        (dspy.History(messages=[]), '{"messages": []}'),
        ({1}, "{1}"),
    ],
)
def test_any_result_becomes_text(value: Any, text: str) -> None:
    def give() -> Any:
        """Give."""
        return value

    result = as_tool(give).run("")
    assert (result.text, result.error) == (text, False)
    assert result.seconds >= 0


def raising(error: BaseException) -> Tool:
    def fail() -> str:
        """Fail."""
        raise error

    return as_tool(fail)


@pytest.mark.parametrize("timeout_s", [None, 10.0])
def test_whatever_a_tool_raises_is_data(timeout_s: float | None) -> None:
    for error, text in [
        (ValueError("no such thing"), "ValueError: no such thing"),
        (SystemExit(3), "SystemExit: 3"),
        (RuntimeError(), "RuntimeError"),
        (GeneratorExit(), "GeneratorExit"),
        (asyncio.CancelledError(), "CancelledError"),
        (ToolError("the server is gone"), "the server is gone"),
        (OSError("x" * 9999), f"OSError: {'x' * 500}…"),
    ]:
        result = raising(error).run("", timeout_s)
        assert (result.text, result.error) == (text, True)
    with pytest.raises(KeyboardInterrupt):
        raising(KeyboardInterrupt()).run("", timeout_s)


def test_a_tool_that_hangs_is_given_up() -> None:
    release = threading.Event()

    def hang() -> str:
        """Hang."""
        release.wait()
        return "late"

    result = as_tool(hang).run("", timeout_s=0.05)
    release.set()
    assert (result.text, result.error) == ("hang gave no answer within 0.05 s", True)
    assert 0.05 <= result.seconds < 5


def test_the_context_of_the_caller_is_the_tools() -> None:
    def see() -> str:
        """See."""
        return MARK.get()

    MARK.set("something")
    assert as_tool(see).run("", timeout_s=10.0).text == "something"


@pytest.mark.parametrize("timeout_s", [None, 10.0])
def test_async_functions_run_within_and_without_a_loop(timeout_s: float | None) -> None:
    tool = as_tool(later)

    async def inside() -> str:
        return tool.run("hello", timeout_s).text

    assert tool.run("hello", timeout_s).text == "hello"
    assert asyncio.run(inside()) == "hello"


def test_copies_of_a_program_share_the_tool() -> None:
    tool = as_tool(echo)
    assert copy.deepcopy([tool])[0] is tool
    program = dspy.ReAct("question -> answer", tools=[tool])
    assert program.deepcopy().tools["echo"] is tool


def test_react_uses_a_tool() -> None:
    steps = [
        {"next_thought": "say", "next_tool_name": "echo", "next_tool_args": {"text": "hello"}},
        {"next_thought": "done", "next_tool_name": "finish", "next_tool_args": {}},
        {"reasoning": "it said so", "answer": "hello"},
    ]
    program = dspy.ReAct("question -> answer", tools=[as_tool(echo)])
    program.set_lm(DummyLM(steps))
    prediction = program(question="?")
    assert prediction.trajectory["observation_0"] == "hello"
    assert prediction.answer == "hello"


def test_methods_and_objects_that_can_be_called_are_tools() -> None:
    class Counter:
        """Counts."""

        def __init__(self) -> None:
            self.count = 0

        def __call__(self, step: int) -> "int":
            """Count on."""
            self.count += step
            return self.count

    counter = Counter()
    tool = as_tool(counter)
    assert tool.describe() == "Counter(step: integer) -> integer: Count on."
    assert [tool.run("2").text, tool.run("3").text, counter.count] == ["2", "5", 5]


def test_what_is_no_tool_is_refused() -> None:
    def scattered(*parts: str) -> str:
        return "".join(parts)

    def odd(thing: threading.Lock) -> str:  # type: ignore[valid-type]
        return str(thing)

    def nested(tree: Tree) -> str:
        return str(tree)

    for thing, message in [
        ("echo", "'echo' is no tool"),
        (dict, "is no tool"),
        (lambda text: text, "define it with def"),
        (scattered, "takes parts"),
        (odd, "the arguments of odd have no JSON schema"),
        (nested, "the arguments of nested have no JSON schema"),
    ]:
        with pytest.raises(ToolError, match=message):
            as_tool(thing)


def test_importing_the_tools_loads_nothing_heavy() -> None:
    code = (
        "import sys, dspy; before = {*sys.modules}; import modpo.programs.tools; "
        "print({'mcp', 'bm25s', 'simpleeval', 'torch', 'jsonschema'} & {*sys.modules} - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
