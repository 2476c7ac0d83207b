"""Runs Python code in a jail made by bubblewrap: its own namespaces, limits and user; nothing of it stays."""

import json
import os
import platform
import random
import select
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from modpo.errors import ToolError
from modpo.programs.tools.syscalls import seccomp_filter

CODE = "/code.py"
_MIB = 1 << 20
_OPEN_FILES = 64
_END_S = 5.0
# Run in the jail before the code: sets limits, becomes an ordinary user if it is root, and makes way.
_ENTER = """
import json, os, resource, sys
limits, user, command = json.loads(sys.argv[1])
for name, (soft, hard) in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (soft, hard))
if user is not None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
os.execv(command[0], command)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What code may use; see `PythonSandbox`."""

    wall_s: float
    cpu_s: int
    memory_mb: int
    processes: int
    file_mb: int
    tmp_mb: int
    output_bytes: int


@dataclass(slots=True)
class Ended:
    """How a run ended: what was printed, the exit status, and why it was killed, if it was."""

    out: bytearray = field(default_factory=bytearray)
    err: bytearray = field(default_factory=bytearray)
    status: int = 0
    killed: str | None = None


def find_bwrap() -> str:
    """Find bubblewrap.

    Raises:
        ToolError: it is not there; says what to install.
    """
    if sys.platform != "linux":
        raise ToolError(f"PythonSandbox isolates code with bubblewrap, which needs Linux (or WSL), not {sys.platform}")
    if seccomp_filter() is None:
        raise ToolError(f"PythonSandbox filters system calls on x86_64 and aarch64 only, not on {platform.machine()}")
    found = shutil.which("bwrap")
    if found is None:
        raise ToolError(
            "PythonSandbox isolates code with bubblewrap, which is not installed; install the package bubblewrap "
            "(as root: apt-get install bubblewrap, dnf install bubblewrap, ...)"
        )
    return str(Path(found).resolve())


def run(bwrap: str, code: str, limits: Limits) -> Ended:
    """Run code; returns when none of its processes is left, after at most wall_s and a moment."""
    with ExitStack() as stack:
        code_fd = stack.enter_context(_memory_file(code.encode(errors="replace")))
        filter_fd = stack.enter_context(_memory_file(seccomp_filter() or b""))  # an empty one is refused
        info_read, info_write = os.pipe()
        stack.callback(os.close, info_read)
        command = [
            *(bwrap, "--info-fd", str(info_write), "--seccomp", str(filter_fd)),
            *("--perms", "0444", "--ro-bind-data", str(code_fd), CODE),
            *_walls(limits),
            *("--", str(_python()), "-I", "-S", "-c", _ENTER, json.dumps(_entry(limits))),
        ]
        try:
            # With an empty environment, of which the jail's process 1 keeps a copy.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
                cwd="/",
                pass_fds=(code_fd, filter_fd, info_write),
            )
        finally:
            os.close(info_write)
        return _watch(process, info_read, limits)


def _walls(limits: Limits) -> Iterator[str]:
    """Bubblewrap's options: what is seen, and what is cut off."""
    yield from ("--die-with-parent", "--new-session", "--hostname", "sandbox", "--unshare-uts")
    yield from ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-cgroup-try")
    # Limits on processes do not bind root: it enters with no more than the right to become another user.
    yield from ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID") if os.geteuid() == 0 else ("--unshare-user",)
    for folder in _seen():
        # Left to bubblewrap, a parent gets the mode of the real one, which may let nobody but its owner through.
        for parent in [*folder.parents][-2::-1]:
            yield from ("--perms", "0755", "--dir", str(parent))
        yield from ("--ro-bind", str(folder), str(folder))
    for folder in map(Path, ("/bin", "/lib", "/lib32", "/lib64")):
        if folder.is_symlink():
            yield from ("--symlink", str(folder.readlink()), str(folder))
        elif folder.is_dir():
            yield from ("--ro-bind", str(folder), str(folder))
    yield from ("--perms", "0755", "--dir", "/etc", "--ro-bind-try", *2 * ("/etc/ld.so.cache",))
    yield from ("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev")
    yield from ("--perms", "1777", "--size", str(limits.tmp_mb * _MIB), "--tmpfs", "/tmp")
    yield from ("--remount-ro", "/", "--chdir", "/tmp")
    yield "--clearenv"
    for name, value in {"HOME": "/tmp", "TMPDIR": "/tmp", "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}.items():
        yield from ("--setenv", name, value)


def _seen() -> Sequence[Path]:
    """The folders that Python needs: /usr, and where the interpreter lies if that is elsewhere."""
    prefix = Path(sys.base_prefix).resolve()
    if prefix == Path("/"):
        raise ToolError("PythonSandbox cannot show code the interpreter without all else: its prefix is /")
    return [Path("/usr")] if prefix.is_relative_to("/usr") else [Path("/usr"), prefix]


def _python() -> Path:
    """The interpreter itself, outside of any virtual environment."""
    return Path(sys.executable).resolve()


def _entry(limits: Limits) -> tuple[Mapping[str, tuple[int, int]], int | None, Sequence[str]]:
    """What `_ENTER` is told."""
    hard = {
        "AS": limits.memory_mb * _MIB,
        "NPROC": limits.processes,
        "FSIZE": limits.file_mb * _MIB,
        "NOFILE": _OPEN_FILES,
        "STACK": 8 * _MIB,
        **dict.fromkeys(("CORE", "MSGQUEUE", "MEMLOCK", "NICE", "RTPRIO"), 0),
    }
    both = {name: (value, value) for name, value in hard.items()}
    both["CPU"] = (limits.cpu_s, limits.cpu_s + 1)
    user = _ordinary_user() if os.geteuid() == 0 else None
    return both, user, (str(_python()), "-I", "-B", "-X", "utf8", CODE)


def _ordinary_user() -> int:
    """A user number that nobody has, another for each run: processes are counted per user."""
    numbers = [line.split() for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()]
    end = min(1 << 31, max(int(start) + int(count) for start, _, count in numbers))
    if end < 1 << 10:
        raise ToolError("PythonSandbox, run by root, needs users to become: this container has but a few (uid_map)")
    return random.SystemRandom().randrange(end // 2, end - 2)


@contextmanager
def _memory_file(data: bytes) -> Iterator[int]:
    """Give data as an open file that has no name."""
    number = os.memfd_create("modpo")
    try:
        with os.fdopen(os.dup(number), "wb") as file:
            file.write(data)
        os.lseek(number, 0, os.SEEK_SET)
        yield number
    finally:
        os.close(number)


def _watch(process: subprocess.Popen[bytes], info: int, limits: Limits) -> Ended:
    """Collect what is printed until all is over or a limit is passed; then end all of it."""
    assert process.stdout is not None
    assert process.stderr is not None
    ended, first, deadline = Ended(), None, time.monotonic() + limits.wall_s
    too_long = f"ran longer than {limits.wall_s:g} s"
    try:
        with process.stdout as out, process.stderr as err, selectors.DefaultSelector() as selector:
            for file, place in ((out, ended.out), (err, ended.err), (info, bytearray())):
                selector.register(file, selectors.EVENT_READ, place)
            while selector.get_map() and ended.killed is None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    ended.killed = too_long
                    break
                for key, _ in selector.select(left_s):
                    data = os.read(key.fd, 1 << 16)
                    key.data.extend(data)
                    if key.fd == info and not data:
                        first = _handle(key.data)
                    if not data:
                        selector.unregister(key.fileobj)
                    if key.fd != info and len(key.data) > limits.output_bytes:
                        ended.killed = "printed too much"
        if ended.killed is None:
            ended.status = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        ended.killed = too_long
    finally:
        _end(process, first)
    return ended


def _handle(info: bytes) -> int | None:
    """Open a handle of the jail's process 1, of which bubblewrap has said the number."""
    try:
        return os.pidfd_open(json.loads(info)["child-pid"])
    except (ValueError, KeyError, OSError):
        return None


def _end(process: subprocess.Popen[bytes], first: int | None) -> None:
    """Kill what is left. With bubblewrap dies process 1, with it all others; it is gone only after them."""
    process.kill()
    process.wait()
    if first is not None:
        try:
            poll = select.poll()
            poll.register(first, select.POLLIN)
            poll.poll(_END_S * 1000)
        finally:
            os.close(first)
