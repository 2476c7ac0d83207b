"""Commands that models write: how they are read, and refused."""

from typing import Any

import pytest

from modpo.errors import ToolError
from modpo.programs.tools import as_tool
from tests.small_tools import echo, halve, negate, now, pick, repeat, square, total


@pytest.mark.parametrize(
    ("tool", "command", "arguments"),
    [
        (echo, "hello", {"text": "hello"}),
        (echo, '{"text": "hello"}', {"text": "hello"}),
        (echo, "\n\n  a\n\n  b\n\n", {"text": "  a\n\n  b"}),
        (echo, "```python\nif x:\n    y\n```", {"text": "if x:\n    y"}),
        (echo, "```\n\nx\n```\n", {"text": "x"}),
        (echo, "```x```", {"text": "x"}),
        (echo, "```a``` and ```b```", {"text": "```a``` and ```b```"}),
        (echo, '```json\n{"text": "x"}\n```', {"text": "x"}),
        (echo, '{"text": "two\nlines"}', {"text": "two\nlines"}),
        (echo, '{"key": 1}', {"text": '{"key": 1}'}),
        (echo, '{"text": "x", "key": 1}', {"text": '{"text": "x", "key": 1}'}),
        (echo, "{}", {"text": "{}"}),
        (echo, "{1, 2}", {"text": "{1, 2}"}),
        (echo, "[1]", {"text": "[1]"}),
        (echo, '{"a":' * 9999, {"text": '{"a":' * 9999}),
        (echo, "", {"text": ""}),
        (square, " 12\n", {"number": 12}),
        (square, '{"number": 12}', {"number": 12}),
        (halve, "-1.5", {"number": -1.5}),
        (negate, "True", {"flag": True}),
        (negate, "false", {"flag": False}),
        (pick, "up", {"way": "up"}),
        (total, "[1, 2]", {"numbers": [1, 2]}),
        (repeat, '{"text": "a", "times": 2}', {"text": "a", "times": 2}),
        (now, "", {}),
        (now, "{}", {}),
    ],
)
def test_a_command_is_read(tool: Any, command: str, arguments: dict[str, Any]) -> None:
    assert as_tool(tool).parse(command) == arguments


@pytest.mark.parametrize(
    ("tool", "command", "message"),
    [
        (repeat, "a", "repeat takes a JSON object, not 'a'; inputs: text: string, times: integer, sep: string"),
        (repeat, '{"text": "a"}', "'times' is missing; inputs: text: string, times: integer"),
        (repeat, '{"text": "a", "times": 1, "of": 2}', "no input 'of'"),
        (repeat, '{"text": "a", "times": "two"}', "times is not integer: 'two'"),
        (repeat, '{"text": "a", "times": true}', "times is not integer: 'true'"),
        (repeat, '{"text": "a", "times": 1, "sep": null}', "sep is not string: 'null'"),
        (echo, '{"text": 5}', "text is not string: '5'; inputs: text: string"),
        (square, "twelve", "number is not integer: 'twelve'"),
        (square, '{"count": 2}', "no input 'count', 'number' is missing"),
        (square, "1.5", "number is not integer: '1.5'"),
        (negate, "maybe", "flag is not boolean: 'maybe'"),
        (pick, "left", "'left' is not one of"),
        (total, '["a"]', "'a' is not of type 'integer'"),
        (now, "at once", "now takes a JSON object, not 'at once'; inputs: none"),
    ],
)
def test_a_command_that_does_not_fit_is_refused_with_the_inputs(tool: Any, command: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        as_tool(tool).parse(command)
    result = as_tool(tool).run(command)
    assert result.error
    assert message in result.text


def test_a_command_that_is_written_is_read_back() -> None:
    for tool, arguments in [
        (as_tool(echo), {"text": "plain"}),
        (as_tool(echo), {"text": "two\nlines "}),
        (as_tool(echo), {"text": '{"text": 1}'}),
        (as_tool(square), {"number": 3}),
        (as_tool(repeat), {"text": "a", "times": 2}),
        (as_tool(now), {}),
    ]:
        assert tool.parse(tool.command(arguments)) == arguments


def test_examples_must_fit() -> None:
    with pytest.raises(ToolError, match="number is not integer"):
        as_tool(square, examples=[({"number": "x"}, "1")])
