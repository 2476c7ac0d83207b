"""Code that reaches for what lies outside of the sandbox: nothing is written, read or called."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from modpo.programs.tools import PythonSandbox, Tool
from tests.sandboxes import attempts, run, sandbox_or_skip

MARK = "modpo-sandbox-test"


@pytest.fixture(scope="module")
def box() -> PythonSandbox:
    return sandbox_or_skip()


@pytest.fixture
def tool(box: PythonSandbox) -> Iterator[Tool]:
    yield from attempts(box)


@pytest.mark.parametrize(
    "where", ["/", "/usr", "/dev", "/dev/shm", "/etc", "/proc/sys/kernel/hostname", sys.base_prefix]
)
def test_nothing_outside_can_be_written(tool: Tool, where: str) -> None:
    code = f"""
        import os
        path = {where!r}
        try:
            open(os.path.join(path, {MARK!r}) if os.path.isdir(path) else path, "w").write("x")
        except OSError as error:
            print("refused", error.strerror)
        """
    assert run(tool, code).text.startswith("refused")
    assert not Path(where, MARK).exists()


def test_secrets_are_not_seen(tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text(MARK)
    secret.chmod(0o644)
    monkeypatch.setenv("MODPO_SECRET", MARK)
    for path in (secret, Path(__file__), Path("/etc/passwd"), Path("/etc/shadow"), Path.home() / ".bashrc"):
        assert "FileNotFoundError" in run(tool, f"print(open({str(path)!r}).read())").text
    linked = f"import os\nos.symlink({str(secret)!r}, 'link')\nprint(open('link').read())"
    assert "FileNotFoundError" in run(tool, linked).text
    code = """
        import os, glob
        print(sorted(os.environ))
        for name in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
            try:
                print(name, open(name, "rb").read())
            except OSError as error:
                print(error.strerror)
        print([os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if n in "012"])
        """
    seen = run(tool, code).text
    assert seen.startswith("['HOME', 'LANG', 'PATH', 'PWD', 'TMPDIR']")
    assert MARK not in seen
    assert "MODPO" not in seen


def test_there_is_no_network(tool: Tool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        connect = f"import socket; socket.create_connection({server.getsockname()!r}, timeout=2)"
        assert "Error" in run(tool, connect).text.splitlines()[-1]
        with pytest.raises(TimeoutError):
            server.accept()
    assert "gaierror" in run(tool, "import socket; socket.getaddrinfo('example.com', 80)").text
    assert "Error" in run(tool, "import socket; socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)").text


def test_it_runs_as_nobody_and_cannot_become_more(tool: Tool) -> None:
    code = """
        import os, ctypes
        print(os.getuid() > 0, os.getgid() > 0 or os.getgroups() == [])
        print([line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapEff", "NoNewPrivs"))])
        print(ctypes.CDLL(None).unshare(0x10000000))
        try:
            os.setuid(0)
        except OSError as error:
            print(type(error).__name__)
        """
    assert run(tool, code).text == "True True\n['0000000000000000', '1']\n-1\nPermissionError"
