"""The store when things go wrong for real: kill -9, two processes, a full disk, Ctrl-C."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from modpo.errors import RunLockedError
from modpo.store import StepRecord, Store, uninterrupted
from tests.store_values import a_rollout, a_store, stored


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return a_store(tmp_path / "run")


HEAD = """
import os, resource, signal
from dataclasses import replace
from pathlib import Path
from modpo.errors import RunLockedError, StoreError
from modpo.store import StepRecord, Store
from tests.store_values import a_call, a_rollout
"""


def start(script: str, *args: object) -> "subprocess.Popen[str]":
    """Run a script with what it needs in another process."""
    root = str(Path(__file__).parents[1])
    head = f"import sys; sys.path.insert(0, {root!r})\n{HEAD}\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(script), *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


WRITE_FOREVER = """
store = Store.open(Path(sys.argv[1]))
with store.lock():
    for step in range(10**6):
        rollouts = [a_rollout(sample, float(step)) for sample in range(20)]
        store.save_rollouts(step, rollouts)
        print(step, "begun", flush=True)
        store.save_step(StepRecord(step=step, rollouts=rollouts, metrics={"step": step}))
        print(step, "done", flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.011])
def test_a_killed_writer_leaves_whole_steps(store: Store, delay_s: float) -> None:
    with start(WRITE_FOREVER, store.folder) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if line == "2 done\n":
                break
        time.sleep(delay_s)
        writer.send_signal(signal.SIGKILL)
        said = [line.split() for line in writer.stdout]
    promised = max([2, *(int(step) for step, what in said if what == "done")])
    with Store.open(store.folder) as again:
        last = again.last_done_step()
        assert last is not None
        assert last in (promised, promised + 1)
        for step in again.steps():
            rollouts = again.rollouts(step.step)
            assert rollouts == [stored(a_rollout(sample, float(step.step))) for sample in range(20)]
            assert step.metrics == ({"step": step.step} if step.done else {})
        assert [step.step for step in again.steps() if step.done] == list(range(last + 1))
        with again.lock():  # the killed process's lock went with it
            again.save_step(StepRecord(step=last + 1))
            assert again.last_done_step() == last + 1


def test_two_processes_cannot_work_on_one_run(store: Store) -> None:
    script = """
    try:
        with Store.open(Path(sys.argv[1])).lock():
            print("locked")
    except RunLockedError as error:
        print(error)
    """
    with store.lock(), start(script, store.folder) as other:
        said, trouble = other.communicate()
    assert trouble == ""
    assert f"another process (pid {os.getpid()} on " in said
    with start(script, store.folder) as other:
        assert other.communicate()[0] == "locked\n"


def test_a_lock_of_the_same_process_counts_too(store: Store) -> None:
    with store.lock(), pytest.raises(RunLockedError, match=str(os.getpid())), Store.open(store.folder).lock():
        pass


FULL_DISK = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = Store.open(Path(sys.argv[1]))
size = (store.folder / "run.db").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 200_000, size + 200_000))
for step in range(10**4):
    noise = tuple(int.from_bytes(os.urandom(3), "big") for _ in range(5_000))
    call = replace(a_call(), prompt_ids=noise)
    try:
        store.save_step(StepRecord(step=step, rollouts=[a_rollout(calls=(call,))]))
    except StoreError as error:
        print(step)
        print(error)
        break
"""


def test_a_full_disk_keeps_the_last_good_step(store: Store) -> None:
    with start(FULL_DISK, store.folder) as writer:
        said, trouble = writer.communicate()
    assert trouble == ""
    step, message = said.splitlines()
    assert int(step) > 0
    assert message.startswith("cannot write to the database of run ")
    assert "what was saved before is kept" in message
    assert "modpo resume" in message
    with Store.open(store.folder) as again:
        assert again.last_done_step() == int(step) - 1
        rollouts = again.rollouts(int(step) - 1)
        assert rollouts is not None
        assert len(rollouts[0].calls[0].prompt_ids) == 5_000
        again.save_step(StepRecord(step=int(step)))


def test_ctrl_c_waits_for_the_write_to_end() -> None:
    ended = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            ended.append("inner")
        ended.append("outer")
    assert ended == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
