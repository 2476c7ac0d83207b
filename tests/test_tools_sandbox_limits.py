"""Code that takes more than its share: it is stopped, is data, and leaves nothing behind."""

from collections.abc import Iterator

import pytest

from modpo.programs.tools import PythonSandbox, Tool, as_tool
from tests.sandboxes import HASTY_S, attempts, jailed, run, sandbox_or_skip


@pytest.fixture(scope="module")
def box() -> PythonSandbox:
    return sandbox_or_skip()


@pytest.fixture
def tool(box: PythonSandbox) -> Iterator[Tool]:
    yield from attempts(box)


def test_a_fork_bomb_stays_small(tool: Tool) -> None:
    result = run(
        tool,
        """
        import os
        made = 0
        while True:
            try:
                made += os.fork() > 0
            except OSError as error:
                print(type(error).__name__, flush=True)
        """,
    )
    assert result.error
    assert "BlockingIOError" in result.text


def test_threads_count_as_processes(tool: Tool) -> None:
    result = run(
        tool,
        """
        import threading
        release, threads = threading.Event(), []
        try:
            for _ in range(100):
                threads.append(threading.Thread(target=release.wait))
                threads[-1].start()
        except RuntimeError as error:
            print(error, len(threads) <= 8)
        release.set()
        """,
    )
    assert "can't start new thread True" in result.text


def test_memory_is_bounded(tool: Tool) -> None:
    assert "MemoryError" in run(tool, "x = bytearray(1 << 30)").text
    assert "MemoryError" in run(tool, "x = []\nwhile True: x.append(bytearray(1 << 20))").text


def test_memory_that_no_process_maps_is_refused(tool: Tool) -> None:
    assert "PermissionError" in run(tool, "import os\nos.memfd_create('x')").text
    shared = "import ctypes\nprint(ctypes.CDLL(None, use_errno=True).shmget(0, 1 << 20, 0o1600))"
    assert run(tool, shared).text == "-1"


def test_endless_loops_are_stopped(tool: Tool) -> None:
    patient = as_tool(PythonSandbox(wall_s=30.0, cpu_s=1).python)
    assert patient.run("while True: pass").text == "[stopped by SIGXCPU: too much computing]"
    deaf = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert patient.run(deaf).text == "[stopped by SIGKILL, perhaps for too much computing]"
    hasty = as_tool(PythonSandbox(wall_s=HASTY_S).python)
    asleep = hasty.run("import time\ntime.sleep(1000)")
    assert (asleep.text, asleep.error) == ("[stopped: the code ran longer than 2 s]", True)


def test_ignoring_signals_does_not_help(tool: Tool) -> None:
    result = run(
        tool,
        """
        import signal
        for each in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(each, signal.SIG_IGN)
        while True: pass
        """,
    )
    assert result.error
    assert result.text.startswith("[stopped")


def test_killing_whatever_it_can_kills_the_code_alone(tool: Tool) -> None:
    code = """
        import contextlib, os
        for process in (1, -1, os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(process, 9)
        """
    result = run(tool, code)
    assert (result.text, result.error) == ("[stopped by SIGKILL, perhaps for too much computing]", True)


@pytest.mark.parametrize("ending", ["", "time.sleep(1000)", "os.close(1); os.close(2); time.sleep(1000)"])
def test_a_daemon_does_not_survive(tool: Tool, ending: str) -> None:
    code = f"""
        import os, signal, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                    signal.signal(each, signal.SIG_IGN)
                os.closerange(0, 3)
                time.sleep(1000)
            os._exit(0)
        os.wait()
        {ending}
        """
    result = run(as_tool(PythonSandbox(wall_s=HASTY_S).python), code)
    assert result.error == bool(ending)
    assert jailed() == []


def test_files_are_bounded_and_gone_at_the_next_call(tool: Tool) -> None:
    assert "File too large" in run(tool, "f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))").text
    many = "for i in range(99):\n    with open(str(i), 'wb') as f: f.write(bytes(4 << 20))"
    assert "No space left on device" in run(tool, many).text
    assert run(tool, "open('kept', 'w').write('x'); import os; print(os.listdir())").text == "['kept']"
    assert run(tool, "import os; print(os.getcwd(), os.listdir())").text == "/tmp []"


def test_deep_recursion_is_data(tool: Tool) -> None:
    assert "RecursionError" in run(tool, "def f(): f()\nf()").text
    deeper = run(tool, "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return [f()].copy()\nf()")
    assert deeper.error
