"""Python code that a model wrote, run where it can do no harm."""

import signal
import time
from dataclasses import dataclass
from functools import cache
from typing import Any, Self, final

from modpo.errors import ToolError
from modpo.programs.tools.jail import Ended, Limits, find_bwrap, run
from modpo.programs.tools.tool import ToolResult

# Tries, within the jail, what the limits must prevent, each a bounded number of times.
_PROBE = """
import os, signal
children, most = [], {processes}
try:
    for _ in range(most + 1):
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)
except OSError:
    pass
for child in children:
    os.kill(child, 9)
    os.waitpid(child, 0)
print(len(children) < most, os.getuid() != 0, os.listdir("/tmp"))
"""
_PROBED = "True True []\n"


@final
@dataclass(frozen=True, kw_only=True)
class PythonSandbox:
    """Runs Python code in a jail of its own for each call; its tool is `as_tool(sandbox.python)`.

    The code sees the standard library, /usr and an empty folder to work in; no network, no environment variables, no
    other files, no other processes. When a call is over, so are all of its processes. Nothing is kept for the next.
    This machine's kernel isolates it (namespaces, limits and a filter of system calls, set up by bubblewrap), and a
    hole in the kernel is one in the sandbox: for code of people who mean harm, add a virtual machine. Memory is
    bounded for each process, so `processes` times `memory_mb` in all, and what the kernel spends on many small files.

    Args:
        wall_s: seconds a call may take.
        cpu_s: seconds of computing, for each process.
        memory_mb: MiB of memory, for each process.
        processes: processes and threads at the same time.
        file_mb: MiB per file.
        tmp_mb: MiB of all files together.
        output_chars: characters of output that are kept, and as many of errors; what prints far more is stopped.

    Raises:
        ToolError: a limit is not positive, or the code could not be isolated here: says what to install or allow.
    """

    wall_s: float = 5.0
    cpu_s: int = 4
    memory_mb: int = 256
    processes: int = 8
    file_mb: int = 8
    tmp_mb: int = 16
    output_chars: int = 4000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ToolError(f"PythonSandbox({name}={value!r}): a limit is above 0")
        probe(find_bwrap())

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self

    def python(self, code: str) -> str:
        """Run Python code; print what you want to see.

        Returns:
            what the code printed

        Raises:
            ToolError: the code failed or was stopped; the message is what it printed, the errors last.
        """
        result = self.run(code)
        if result.error:
            raise ToolError(result.text)
        return result.text

    def run(self, code: str) -> ToolResult:
        """Run code and give what it printed, then its errors, then in brackets why it was stopped or cut."""
        started = time.perf_counter()
        ended = run(find_bwrap(), code, self._limits())
        verdict = _verdict(ended)
        parts = [_text(ended.out, self.output_chars), _text(ended.err, self.output_chars), verdict or ""]
        text = "\n".join(part.rstrip("\n") for part in parts if part)
        return ToolResult(text, verdict is not None or ended.status != 0, time.perf_counter() - started)

    def _limits(self) -> Limits:
        own = {name: value for name, value in vars(self).items() if name != "output_chars"}
        return Limits(**own, output_bytes=4 * self.output_chars)


@cache
def probe(bwrap: str) -> None:
    """Try once per process whether isolation works here.

    Raises:
        ToolError: it does not; says what bubblewrap said and what to allow. Tried again at the next call.
    """
    limits = Limits(wall_s=20.0, cpu_s=4, memory_mb=256, processes=6, file_mb=1, tmp_mb=1, output_bytes=4000)
    ended = run(bwrap, _PROBE.format(processes=limits.processes), limits)
    said = (ended.out + ended.err).decode(errors="replace")
    if ended.killed is not None or ended.status != 0 or said != _PROBED:
        raise ToolError(
            f"PythonSandbox cannot isolate code here: {ended.killed or said.strip()[-300:] or ended.status}; it needs "
            "bubblewrap 0.8 or newer and the right to make user namespaces (within a container, that is a setting of "
            "the container; see also the sysctls user.max_user_namespaces, kernel.unprivileged_userns_clone and "
            "kernel.apparmor_restrict_unprivileged_userns)"
        )


def _text(data: bytearray, most: int) -> str:
    text = data.decode(errors="replace").replace("\x00", "\ufffd")
    return text if len(text) <= most else f"{text[:most]}\n[cut: only the first {most} characters are shown]"


def _verdict(ended: Ended) -> str | None:
    """Say what ended the code where that was not itself, or where it said nothing."""
    if ended.killed is not None:
        return f"[stopped: the code {ended.killed}]"
    if ended.status > 128:
        number = ended.status - 128
        name = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
        return f"[stopped by {name}{_LIKELY.get(name, '')}]"
    if ended.status != 0 and not ended.err:
        return f"[exit status {ended.status}]"
    return None


_LIKELY = {"SIGXCPU": ": too much computing", "SIGKILL": ", perhaps for too much computing", "SIGSEGV": ": a crash"}
