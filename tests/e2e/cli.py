"""Runs modpo's command line in processes of their own, on a task file over the tiny model."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TASK = """
import os
import time

import modpo
from tests.e2e.model import heldout, policy, program, right, traces, trainset

{body}

task = modpo.Task(
    program=program(policy({base!r})),
    metric=metric,
    trainset=trainset(),
    valset=heldout()[:8],
    testset=heldout()[8:],
    traces=traces(),
    name="guess",
    settings={settings!r},
)
"""
SETTINGS = {
    "steps": 3,
    "examples_per_step": 4,
    "rollouts_per_example": 4,
    "learning_rate": 5e-3,
    "validate_every": 2,
    "warm_start": {"epochs": 2, "learning_rate": 1e-3},
    "deterministic": True,
}


def write_task(folder, base, *, body="metric = right", **settings):
    """A task file in a folder, and the target that names it."""
    file = folder / "task.py"
    file.write_text(TASK.format(base=str(base), body=body, settings={**SETTINGS, **settings}))
    return f"{file}:task"


def command(*arguments):
    return [sys.executable, "-c", "from modpo.cli import main; main()", *map(str, arguments)]


def environment(**more):
    """One thread, so that machines with other numbers of cores compute the same; the project on the path."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200", **more}


def modpo(*arguments, code=0, cwd=None, **more):
    """Run the command line to its end; the finished process."""
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, cwd=cwd, env=environment(**more), timeout=240, check=False
    )
    assert done.returncode == code, done.stderr[-3000:]
    return done


def modpo_json(*arguments, **more):
    """Run a command with --json; its one object."""
    done = modpo(*arguments, "--json", **more)
    assert done.stdout.count("\n") == 1, done.stdout
    return json.loads(done.stdout)


def one_line(done):
    """The one line of an error."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def started(*arguments, **more):
    """Begin a command; the running process."""
    return subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**more)
    )


def stopped_when(process, seen, *, by=signal.SIGKILL, within_s=120):
    """Send a signal once `seen()` holds; standard error of the process."""
    deadline = time.monotonic() + within_s
    while not seen():
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.005)
    process.send_signal(by)
    return process.communicate(timeout=60)[1]
