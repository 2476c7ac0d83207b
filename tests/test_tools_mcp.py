"""Tools of real MCP servers, over stdio and over HTTP on the loopback interface."""

import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dspy
import pytest

pytest.importorskip("mcp", reason="tools of MCP servers need modpo[tools]")

from modpo.errors import ToolError
from modpo.programs.tools import Tool, mcp_tools

SERVER = [sys.executable, "-m", "tests.mcp_server"]
START_S = 60.0


@contextmanager
def named(**options: Any) -> Iterator[dict[str, Tool]]:
    with mcp_tools(**{"timeout_s": START_S, **options}) as tools:
        yield {str(tool.name): tool for tool in tools}


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, Tool]]:
    with named(command=SERVER) as tools:
        yield tools


def test_the_servers_tools_describe_themselves(tools: dict[str, Tool]) -> None:
    assert set(tools) == {"add", "shout", "table", "fail", "sleep", "die", "see", "walk"}
    assert all(isinstance(tool, dspy.Tool) for tool in tools.values())
    assert tools["add"].describe() == "add(a: integer, b: integer = 1) -> text: Add two numbers."
    assert tools["shout"].describe() == "shout(text: string) -> text: Say it loud."
    assert tools["walk"].describe() == (
        "walk(tree: {size: integer, inner: array = []}, name: integer or null or string = null) -> text: Count all."
    )


@pytest.mark.parametrize(
    ("name", "command", "text"),
    [
        ("add", '{"a": 2, "b": 3}', "5"),
        ("add", "41", "42"),
        ("shout", "hello\nyou", "HELLO\nYOU"),
        ("shout", '{"text": "x"}', "X"),
        ("walk", '{"tree": {"size": 1, "inner": [{"size": 2}, {"size": 3}]}}', "6"),
        ("walk", '{"tree": {"size": 1}, "name": "oak"}', "1"),
    ],
)
def test_a_call_comes_back(tools: dict[str, Tool], name: str, command: str, text: str) -> None:
    result = tools[name].run(command)
    assert (result.text, result.error) == (text, False)


def test_data_comes_back_as_json(tools: dict[str, Tool]) -> None:
    assert "".join(tools["table"].run("").text.split()) == '{"rows":[1,2]}'


def test_what_the_server_calls_an_error_is_one(tools: dict[str, Tool]) -> None:
    with pytest.raises(ToolError, match="because"):
        tools["fail"](reason="because")
    result = tools["fail"].run("because")
    assert result.error
    assert "because" in result.text


def test_arguments_are_held_against_the_servers_schema(tools: dict[str, Tool]) -> None:
    assert tools["add"].run('{"a": "x"}').text == "add: a is not integer: 'x'; inputs: a: integer, b: integer = 1"
    assert tools["add"].run('{"b": 2}').error


def test_the_server_does_not_see_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODPO_SECRET", "secret")
    with named(command=SERVER) as own:
        assert own["see"].run("MODPO_SECRET").text == "not set"
        assert own["see"].run("PATH").text != "not set"


def test_many_rollouts_call_at_once(tools: dict[str, Tool]) -> None:
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda a: tools["add"].run(f'{{"a": {a}, "b": 1}}').text, range(64)))
    assert results == [str(a + 1) for a in range(64)]


def test_a_server_that_dies_says_so_and_nothing_hangs() -> None:
    with named(command=SERVER) as own:
        for name, command in [("die", ""), ("shout", "x")]:
            result = own[name].run(command)
            assert result.error
            assert result.text.startswith(f"{name}: the MCP server {' '.join(SERVER)} failed: ")
            assert result.seconds < START_S / 2


def test_a_slow_call_is_given_up_and_the_session_goes_on() -> None:
    with http_server() as (url, _), named(url=url, timeout_s=2.0) as own:
        assert own["sleep"].run("10", timeout_s=0.05).text == "sleep gave no answer within 0.05 s"
        late = own["sleep"].run("3")
        assert late.error
        assert late.text == f"sleep: the MCP server {url} gave no answer within 2 s"
        assert own["shout"].run("x").text == "X"


def test_after_the_block_the_tools_say_that_it_has_ended() -> None:
    before = threading.active_count()
    with named(command=SERVER) as own:
        pass
    assert threading.active_count() == before
    result = own["shout"].run("x")
    assert (result.error, result.text.endswith("has ended")) == (True, True)


@contextmanager
def http_server() -> Iterator[tuple[str, Any]]:
    """The same server over streamable HTTP, in a thread; gives its URL and what ends it."""
    import uvicorn

    from tests.mcp_server import server

    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(server.streamable_http_app(), log_level="error", timeout_graceful_shutdown=1)
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()

        def end() -> None:
            running.should_exit = True
            thread.join(30)

        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp", end
        finally:
            end()


def test_a_server_over_http() -> None:
    with http_server() as (url, end), named(url=url) as own:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda a: own["add"].run(str(a)).text, range(16))) == [str(a + 1) for a in range(16)]
        assert "because" in own["fail"].run("because").text
        end()
        gone = own["shout"].run("x")
        assert gone.error
        assert f"the MCP server {url} failed: " in gone.text


def test_what_is_no_server_is_refused_with_what_it_said(tmp_path: Path) -> None:
    for options, message in [
        ({"command": [str(tmp_path / "none")]}, "no MCP server answers at .*FileNotFoundError"),
        ({"command": [sys.executable, "-c", "raise SystemExit('no licence')"]}, "it said: no licence"),
        ({"url": "http://127.0.0.1:9/mcp"}, "no MCP server answers at http://127.0.0.1:9/mcp: "),
    ]:
        with pytest.raises(ToolError, match=message):
            with mcp_tools(**options, timeout_s=START_S):
                pass


def test_a_server_that_never_answers_is_given_up_and_ended() -> None:
    started = time.monotonic()
    with pytest.raises(ToolError, match="did not answer within 0.5 s"):
        with mcp_tools(command=[sys.executable, "-c", "import time; time.sleep(1000)"], timeout_s=0.5):
            pass
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("options", [{}, {"command": ["a"], "url": "http://b"}, {"command": "a b"}, {"command": []}])
def test_one_way_to_reach_the_server_must_be_given(options: dict[str, Any]) -> None:
    with pytest.raises(ToolError, match="give one of them"):
        with mcp_tools(**options):
            pass
