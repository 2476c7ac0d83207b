"""Sampling while the trainer works: how old a call may be, what stops, and that it still learns."""

import threading

import pytest

from modpo.errors import ConfigError, MetricError
from modpo.optimizers import MMGRPO
from modpo.store import Store
from tests.e2e.model import heldout, policy, program, right, trainset

SETTINGS = {
    "steps": 12, "examples_per_step": 8, "rollouts_per_example": 8, "learning_rate": 5e-3, "seed": 1, "quiet": True,
    "max_staleness": 1,
}  # fmt: skip


def ahead_threads():
    return [thread for thread in threading.enumerate() if thread.name == "modpo-ahead"]


def staleness(store, step):
    """How many versions older each trained call of a step is than the weights it was trained on."""
    return {
        step - call.version for rollout in store.rollouts(step) for call in rollout.calls if call.adapter == "solve"
    }


def test_calls_are_at_most_so_old_and_the_program_learns(base, tmp_path):
    optimizer = MMGRPO(right, run_folder=tmp_path / "run", **SETTINGS)
    optimizer.compile(program(policy(base)), trainset=trainset(), valset=heldout())
    with Store.open(tmp_path / "run") as store:
        ages = [staleness(store, step) for step in range(12)]
        counted = [step.metrics["left_out"] for step in store.steps("train")]
    assert ages[0] == {0}
    assert set().union(*ages) == {0, 1}  # some were sampled while the trainer worked, none is older than allowed
    assert not any("stale group" in left_out for left_out in counted)
    assert optimizer.result.after >= 0.8
    assert not ahead_threads()


def test_what_an_interrupted_attempt_left_too_old_is_dropped_and_counted(base, tmp_path, monkeypatch):
    monkeypatch.setattr("modpo.loop.too_old", lambda x, state: lambda call: call.adapter == "plan")
    optimizer = MMGRPO(right, run_folder=tmp_path / "run", **{**SETTINGS, "steps": 1})
    optimizer.compile(program(policy(base)), trainset=trainset(), valset=heldout())
    with Store.open(tmp_path / "run") as store:
        (step,) = store.steps("train")
    assert step.metrics["left_out"]["stale group"] == 64
    assert optimizer.result.versions["plan"] == 0


def test_a_run_that_stops_takes_its_sampling_with_it(base, tmp_path):
    seen = []

    def failing(example, prediction, trace=None):
        seen.append(example)
        return None if len(seen) > 40 else 1.0

    optimizer = MMGRPO(failing, run_folder=tmp_path / "run", **SETTINGS)
    with pytest.raises(MetricError):
        optimizer.compile(program(policy(base)), trainset=trainset(), valset=heldout()[:4])
    assert not ahead_threads()


def test_it_cannot_be_deterministic(base, tmp_path):
    optimizer = MMGRPO(right, run_folder=tmp_path / "run", **SETTINGS, deterministic=True)
    with pytest.raises(ConfigError, match="exclude each other"):
        optimizer.compile(program(policy(base)), trainset=trainset(), valset=heldout())
