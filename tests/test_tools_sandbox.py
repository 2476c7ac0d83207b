"""The sandbox: what comes back, and when it refuses to be made."""

import copy
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from modpo.errors import ToolError
from modpo.programs.tools import PythonSandbox, Tool, jail, sandbox
from tests.sandboxes import attempts, run, sandbox_or_skip


@pytest.fixture(scope="module")
def box() -> PythonSandbox:
    return sandbox_or_skip()


@pytest.fixture
def tool(box: PythonSandbox) -> Iterator[Tool]:
    yield from attempts(box)


def test_what_is_printed_comes_back(tool: Tool) -> None:
    assert tool.describe() == (
        "python(code: string) -> what the code printed: Run Python code; print what you want to see."
    )
    result = run(tool, "```python\nimport sys, math\nprint(math.pi)\nprint('careful', file=sys.stderr)\n```")
    assert (result.text, result.error) == ("3.141592653589793\ncareful", False)
    assert run(tool, "{'a': 1}").text == ""


def test_a_failure_is_the_traceback_of_the_code_alone(tool: Tool) -> None:
    result = run(tool, "print('before')\nx = 1 / 0")
    assert result.error
    lines = result.text.splitlines()
    assert lines[:3] == ["before", "Traceback (most recent call last):", '  File "/code.py", line 2, in <module>']
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert run(tool, "raise SystemExit(3)").text == "[exit status 3]"
    assert "SyntaxError" in run(tool, "if").text


def test_output_is_bounded(tool: Tool) -> None:
    huge = run(tool, "for _ in range(1000): print('x' * (1 << 20))")
    assert huge.error
    assert huge.text.endswith("[cut: only the first 4000 characters are shown]\n[stopped: the code printed too much]")
    cut = run(tool, "print('y' * 5000)")
    assert (cut.text, cut.error) == ("y" * 4000 + "\n[cut: only the first 4000 characters are shown]", False)


def test_binary_output_is_text(tool: Tool) -> None:
    result = run(tool, r"import sys; sys.stdout.buffer.write(b'\xff\x00ok')")
    assert (result.text, result.error) == ("\ufffd\ufffdok", False)


def test_many_at_once(box: PythonSandbox) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: box.run(f"print({i} ** 2)"), range(16)))
    assert [result.text for result in results] == [str(i**2) for i in range(16)]
    assert copy.deepcopy(box) is box


def test_a_limit_that_does_not_bind_is_found_out(box: PythonSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root is not bound by a limit on processes")
    monkeypatch.setattr(jail, "_ordinary_user", lambda: None)
    with pytest.raises(ToolError, match="cannot isolate code here: False False"):
        sandbox.probe.__wrapped__(jail.find_bwrap())


def test_without_bubblewrap_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolError, match="apt-get install bubblewrap"):
        PythonSandbox()
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho bwrap: no permissions to create a new namespace >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(ToolError, match="here: bwrap: no permissions .*user.max_user_namespaces"):
        PythonSandbox()


def test_where_system_calls_cannot_be_filtered_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox_or_skip()
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(ToolError, match="not on riscv64"):
        PythonSandbox()


def test_limits_are_positive() -> None:
    with pytest.raises(ToolError, match=r"PythonSandbox\(processes=0\)"):
        PythonSandbox(processes=0)


def test_little_output_and_a_trickle_of_it_are_bounded_too() -> None:
    sandbox_or_skip()
    box = PythonSandbox(output_chars=10, wall_s=1.0)
    assert box.run("print('ok')").text == "ok"
    trickle = "import sys\nwhile True: sys.stdout.write(''); sys.stdout.flush()"
    assert box.run(trickle).text == "[stopped: the code ran longer than 1 s]"
