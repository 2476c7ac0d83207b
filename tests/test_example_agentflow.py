"""The AgentFlow example and the table of arms: what is trained, what is shown, what is not done twice."""

from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

from modpo.lm.binding import bind
from modpo.optimizers.result import RunResult
from modpo.programs.agentflow import gym
from modpo.store import RunInfo, StepRecord, Store, Validation
from tests.bench import arms
from tests.examples import load_example
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_example("agentflow")


def test_each_arm_trains_its_roles_and_leaves_the_others(example):
    assert example.rates("planner") == {"planner": 2e-4, "executor": 0.0, "verifier": 0.0, "generator": 0.0}
    assert example.rates("both")["executor"] == 1e-4
    assert set(example.rates("both")) == set(gym.ROLES)


def test_figures_and_what_people_read(example):
    measures = {"before": {}, "warm": {"turns": 2.0, "tool_errors": 0.5}, "after": {"turns": 1.0, "tool_errors": 0.0}}
    result = RunResult(
        run=Path("runs/x"), before=0.0, warm=0.25, after=0.75, measures=measures, ci95_gain=(0.4, 0.6),
        seconds=120.0, steps=7, versions={},
    )  # fmt: skip
    found = example.figures(result)
    assert found["success"] == {"before": 0.0, "warm": 0.25, "after": 0.75}
    assert found["turns"] == {"before": None, "warm": 2.0, "after": 1.0}
    text = example.describe(found)
    assert "held-out success: before 0.0%, warm 25.0%, after 75.0%" in text
    assert "mean turns: before -, warm 2.00, after 1.00" in text
    assert "7 steps in 2 minutes" in text


def kept(folder, warm, after, status="done"):
    """A run that ended with these successes."""
    with Store.create(folder) as store:
        store.save_run(RunInfo(name="agentflow", optimizer="FlowGRPO", estimates={"seconds": 60.0}, status=status))
        for label, score in (("warm", warm), ("after", after)):
            measures = {"turns": 2.0, "tool_errors": score}
            store.save_validation(Validation(label=label, step=-1, scores=(score,), measures=measures))


def test_the_table_skips_what_is_done_and_goes_on_with_what_is_not(tmp_path, monkeypatch):
    options = Namespace(
        model="tiny", seeds=2, first_seed=0, steps=24, arms=["planner", "executor", "both"], runs=tmp_path
    )
    for seed, after in enumerate((0.75, 1.0)):
        kept(arms.folder_of(options, "both", seed), 0.5, after)
    kept(arms.folder_of(options, "planner", 0), 0.5, 0.5, status="stopped")
    asked = []
    monkeypatch.setattr(arms, "setting", lambda *_: (None, {}))
    monkeypatch.setattr(
        arms, "compile_task", lambda *_, run_folder, resume, **__: asked.append((run_folder.name, resume))
    )
    for arm in ("both", "planner", "executor"):
        arms.fill(options, arm, 0)
    assert asked == [("tiny-planner-seed0", True), ("tiny-executor-seed0", False)]

    found = arms.table(options)["arms"]
    assert found["both"]["seeds"] == [0, 1]
    assert found["both"]["gain"] == 0.375
    # two gains, 0.25 and 0.5: standard error 0.125, t(0.975, 1) = 12.706
    assert found["both"]["gain_ci95"] == pytest.approx([0.375 - 12.706 * 0.125, 0.375 + 12.706 * 0.125], rel=1e-4)
    assert found["planner"] == {"seeds": []}
    assert arms.interval([0.0, 0.0]) == [0.0, 0.0]  # where no seed's training found anything
    text = arms.written({"arms": found})
    assert "| both | 2 | 0 | 0.500 | 0.875 | +0.375" in text
    assert "| executor | 0 |" in text


def test_an_arm_begins_with_the_warm_start_that_another_has_made(example, tmp_path, monkeypatch):
    options = Namespace(model="small", steps=24, runs=tmp_path)
    donor = arms.folder_of(options, "both", 2)
    kept(donor, 0.5, 1.0, status="stopped")
    assert arms.warm_versions(donor) == {}  # measured, but not after a warm start
    versions = dict.fromkeys(gym.ROLES, 3)
    with Store.open(donor) as store:
        store.save_step(StepRecord(step=0, phase="warm"))
        store.save_validation(Validation(label="warm", step=-1, scores=(0.5,), adapters=versions))
    for role in gym.ROLES:
        (donor / "adapters" / role / "v3").mkdir(parents=True)
    task = example.policy_task(2, save_tiny(tmp_path / "base"))
    given = {}
    monkeypatch.setattr(arms, "setting", lambda *_: (task, {}))
    monkeypatch.setattr(arms, "compile_task", lambda task, *_, run_folder, **__: given.update({run_folder.name: task}))
    for arm in ("planner", "both"):
        arms.fill(options, arm, 2)
    borrowed = given["small-planner-seed2"]
    assert borrowed.traces is None
    assert bind(borrowed.program).starts == {role: donor / "adapters" / role / "v3" for role in gym.ROLES}
    assert given["small-both-seed2"] is task  # it made the warm start itself


def test_roles_differ_in_the_length_of_their_answers_and_share_one_policy(example, tmp_path):
    task = example.policy_task(2, save_tiny(tmp_path / "base"))
    lms = {role: getattr(task.program, role).lm for role in gym.ROLES}
    assert {role: lm.kwargs["max_tokens"] for role, lm in lms.items()} == example.MAX_TOKENS
    assert len({id(lm.policy) for lm in lms.values()}) == 1
