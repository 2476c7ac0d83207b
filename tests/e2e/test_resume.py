"""Runs that are killed, stopped or out of disk go on where they were, and end as if nothing had happened."""

import errno
import os
import resource
import signal
import subprocess

import pytest

from modpo.errors import StoreError
from modpo.optimizers import MMGRPO
from modpo.store import Store
from modpo.train import checkpoint
from tests.e2e import cli
from tests.e2e.model import adapter_files, heldout, policy, program, right, trainset

# A metric that tells from outside how far the run is: each scored question is a line of a file.
TELLING = """
def metric(example, prediction, trace=None):
    with open(os.environ["MARKS"], "a") as file:
        file.write(example.q + "\\n")
    return right(example, prediction)
"""
TRAINING = tuple("012345")


def seen_in_training(marks, count):
    lines = marks.read_text().split() if marks.exists() else []
    return sum(line.endswith(TRAINING) for line in lines) >= count


def steps_done(run):
    if not (run / "run.db").exists():
        return 0
    with Store.open(run) as store:
        last = store.last_done_step()
    return 0 if last is None else last + 1


def story(run):
    """All that must not depend on how often a run was interrupted."""
    with Store.open(run) as store:
        rollouts = [store.rollouts(step.step) for step in store.steps("train")]
        scores = [(made.label, made.step, made.scores, made.adapters) for made in store.validations()]
    calls = [
        [(r.example, r.sample, r.reward, [(c.prompt_ids, c.completion_ids, c.logprobs) for c in r.calls]) for r in step]
        for step in rollouts
    ]
    return calls, scores, adapter_files(run)


@pytest.fixture(scope="module")
def place(base, tmp_path_factory):
    """A task's target, its unbroken run's story, and a folder to work in."""
    folder = tmp_path_factory.mktemp("resume")
    target = cli.write_task(folder, base, body=TELLING)
    cli.modpo("compile", target, "--run", folder / "whole", MARKS=str(folder / "marks-whole"))
    return folder, target, story(folder / "whole")


def test_a_run_killed_again_and_again_ends_as_an_unbroken_one(place):
    folder, target, whole = place
    run, marks = folder / "broken", folder / "marks"
    told = {"MARKS": str(marks)}
    # a version of the warm start is on disk, perhaps not yet recorded
    begun = cli.started("compile", target, "--run", run, **told)
    cli.stopped_when(begun, (run / "adapters" / "plan" / "v1").exists)
    assert steps_done(run) == 0
    # in the middle of the first step's sampling
    cli.stopped_when(cli.started("resume", run, **told), lambda: seen_in_training(marks, 3))
    # right after a step
    cli.stopped_when(cli.started("resume", run, **told), lambda: steps_done(run) >= 1)
    # Ctrl-C, in the middle of a later step's sampling
    marks.unlink()
    process = cli.started("resume", run, **told)
    said = cli.stopped_when(process, lambda: seen_in_training(marks, 3), by=signal.SIGINT)
    assert process.returncode == 130, said
    assert f"modpo resume {run}" in said
    assert "Traceback" not in said
    with Store.open(run) as store:
        assert store.run().status == "stopped"
        for file in store.latest_adapters():
            store.verify(file)
    cli.modpo("resume", run, **told)
    assert story(run) == whole
    with Store.open(run) as store:
        assert store.run().status == "done"


def test_a_second_process_on_a_run_is_refused(place):
    folder = place[0]
    with Store.open(folder / "whole") as store, store.lock():
        done = cli.modpo("resume", folder / "whole", code=2, MARKS=str(folder / "marks-second"))
    assert str(os.getpid()) in cli.one_line(done)


def test_a_file_size_limit_is_one_line_and_the_run_goes_on_without_it(place):
    folder, target, whole = place
    run, told = folder / "limited", {"MARKS": str(folder / "marks-limited")}
    limited = subprocess.run(
        cli.command("compile", target, "--run", run),
        env=cli.environment(**told),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    assert limited.returncode == 2
    assert "cannot write" in cli.one_line(limited)
    cli.modpo("resume", run, **told)
    assert story(run) == whole


def test_a_full_disk_keeps_the_last_good_version(base, tmp_path, monkeypatch):
    run = tmp_path / "run"

    def optimizer(**more):
        return MMGRPO(
            right, run_folder=run, steps=3, examples_per_step=4, rollouts_per_example=4, validate_every=None,
            learning_rate=5e-3, quiet=True, **more,
        )  # fmt: skip

    flush = checkpoint._flush

    def full(path):
        if "v2" in str(path) and "preflight" not in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_flush", full)
        with pytest.raises(StoreError, match=r"No space left.*resume"):
            optimizer().compile(program(policy(base)), trainset=trainset())
    with Store.open(run) as store:
        assert store.run().status == "failed"
        assert store.last_done_step() == 0
        kept = store.latest_adapters()
        assert {(file.name, file.version) for file in kept} == {("plan", 1), ("solve", 1)}
        for file in kept:
            store.verify(file)
    assert not list(run.glob("adapters/*/.*tmp"))
    compiled = optimizer(resume=True).compile(program(policy(base)), trainset=trainset())
    assert compiled.plan.lm.version == 3
    assert right(heldout()[0], compiled(q=heldout()[0].q)) in (True, False)
