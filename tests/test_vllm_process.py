import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from modpo.config import VLLM
from modpo.errors import ConfigError, SamplerError
from modpo.lm.vllm.process import ServerProcess, command_of

# A server with a worker of its own, which ignores gentle ends.
SERVER = """
import os, signal, subprocess, sys, time
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
worker = subprocess.Popen([sys.executable, "-c", stubborn])
print("ready", os.getpid(), worker.pid, flush=True)
time.sleep(600)
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def pids(log):
    """Of server and worker, once they are there."""
    until(lambda: log.exists() and b"ready" in log.read_bytes())
    return [int(part) for part in log.read_text().split()[1:]]


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch):
    monkeypatch.setattr("modpo.lm.vllm.keeper.GRACE_S", 5.0)


def test_stopping_ends_the_whole_group(tmp_path):
    process = ServerProcess([sys.executable, "-c", SERVER], tmp_path / "vllm.log")
    started = pids(tmp_path / "vllm.log")
    assert started[0] == process.pid
    assert all(map(alive, started))
    process.stop()
    until(lambda: not any(map(alive, started)))
    process.stop()  # twice does no harm


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_orphan_however_the_owner_ends(tmp_path, sent):
    log = tmp_path / "vllm.log"
    owner = (
        "import sys, time\nfrom pathlib import Path\nfrom modpo.lm.vllm.process import ServerProcess\n"
        f"ServerProcess([sys.executable, '-c', {SERVER!r}], Path({str(log)!r}))\ntime.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", owner], stderr=subprocess.DEVNULL)
    try:
        started = pids(log)
        os.kill(process.pid, sent)
        process.wait(30)
        until(lambda: not any(map(alive, started)))
        assert process.returncode != 0
    finally:
        process.kill()


def test_a_server_that_ends_at_once_says_its_last_words(tmp_path):
    process = ServerProcess([sys.executable, "-c", "raise SystemExit('no such option')"], tmp_path / "vllm.log")
    with pytest.raises(SamplerError, match="ended with code 1.*\n.*no such option"):
        process.wait_ready(lambda: False, 30, lambda _: None)


def test_a_server_that_is_never_ready_is_stopped(tmp_path):
    process = ServerProcess([sys.executable, "-c", SERVER], tmp_path / "vllm.log")
    started = pids(tmp_path / "vllm.log")
    with pytest.raises(SamplerError, match="not ready after 0.3 s"):
        process.wait_ready(lambda: False, 0.3, lambda _: None)
    until(lambda: not any(map(alive, started)))


def test_the_command_passes_the_users_arguments_last(tmp_path):
    python = tmp_path / "python"
    python.touch()
    settings = VLLM.of(python=python, args=("--max-loras", "9"), max_loras=2)
    command = command_of(settings, model="base", dtype="float32", lora_rank=10, port=1234)
    assert command[:3] == [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    assert command[-2:] == ["--max-loras", "9"]
    assert command[command.index("--max-lora-rank") + 1] == "16"
    with pytest.raises(ConfigError, match="up to rank 512, this one has 600"):
        command_of(settings, model="base", dtype="float32", lora_rank=600, port=1)
