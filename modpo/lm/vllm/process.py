"""A vLLM server of ours: started in its own environment, waited for, and ended with its owner."""

import atexit
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

from modpo.config import VLLM
from modpo.errors import ConfigError, SamplerError
from modpo.lm.vllm import keeper

VENV = Path(".venv-vllm")
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
LOG_LINES = 15
ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
}


def python_of(settings: VLLM) -> Path:
    """The interpreter that has vllm.

    Raises:
        ConfigError: there is none where it is said to be.
    """
    chosen = settings.python or VENV / "bin" / "python"
    if not chosen.exists():
        raise ConfigError(
            f"no such interpreter: {chosen}; a vLLM server runs in an environment of its own: make one with "
            "`make vllm-cpu`, name another with python= (--python), or attach to a running server with url= (--url)"
        )
    return chosen.absolute()  # not resolved: a venv's python is a link that knows its venv by its place


def command_of(settings: VLLM, *, model: str, dtype: str, lora_rank: int, port: int) -> list[str]:
    """The command that starts a server; the user's arguments come last, so that they win."""
    rank = next((size for size in LORA_RANKS if size >= lora_rank), None)
    if rank is None:
        raise ConfigError(f"vLLM takes adapters up to rank {LORA_RANKS[-1]}, this one has {lora_rank}; lower its rank")
    ours = {
        "--model": model,
        "--dtype": dtype,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--max-loras": str(settings.max_loras),
        "--max-lora-rank": str(rank),
        "--logprobs-mode": "processed_logprobs",
    }
    flags = [part for pair in ours.items() for part in pair]
    module = "vllm.entrypoints.openai.api_server"
    return [str(python_of(settings)), "-m", module, *flags, "--enable-lora", *settings.args]


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@final
class ServerProcess:
    """Runs a command as a server until `stop`, or until this process ends in whatever way.

    Args:
        command: what to run.
        log: file that gets what the server prints.
        environment: variables over this process's own.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._from = log.stat().st_size if log.exists() else 0
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", str(keeper.__file__), str(log), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process; it then ends the server
            env={**os.environ, **(environment or {})},
        )
        assert self._keeper.stdout is not None
        first = self._keeper.stdout.readline()
        self.pid = int(first) if first.strip() else None
        atexit.register(self.stop)

    def wait_ready(self, ready: Callable[[], bool], timeout_s: float, tell: Callable[[str], None]) -> None:
        """Wait until the server is ready, telling its newest line every few seconds.

        Raises:
            SamplerError: it ended, or is not ready in time; it is stopped then.
        """
        started = told = time.monotonic()
        while not ready():
            waited = time.monotonic() - started
            if self._keeper.poll() is not None or waited > timeout_s:
                what = self.condition() or f"is not ready after {timeout_s:g} s"
                self.stop()
                raise SamplerError(f"the vLLM server {what}; its last lines in {self.log}:\n{self.tail()}")
            if time.monotonic() - told >= 5:
                told = time.monotonic()
                tell(f"waiting for the vLLM server, {waited:.0f} s: {self.tail(1)[-100:]}")
            time.sleep(0.25)

    def wait(self) -> None:
        """Wait until it ends, which it should not; raises a `SamplerError` then."""
        self._keeper.wait()
        raise SamplerError(f"the vLLM server ended: {self.condition()}; its last lines:\n{self.tail()}")

    def condition(self) -> str:
        """How it ended; empty while it runs."""
        code = self._keeper.poll()
        return "" if code is None else f"its process ended with code {code}, see {self.log}"

    def tail(self, lines: int = LOG_LINES) -> str:
        """The last lines of its log."""
        with self.log.open("rb") as file:
            file.seek(max(self._from, self.log.stat().st_size - 20_000))
            text = file.read().decode("utf-8", "replace")
        return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])

    def stop(self) -> None:
        """End it and all its processes; returns once they are gone."""
        atexit.unregister(self.stop)
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.close()
        self._keeper.wait(timeout=3 * keeper.GRACE_S)
        self._keeper.stdout.close()
