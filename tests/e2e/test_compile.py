"""Compiling on a real (tiny) model: what is trained, what stays, what is kept."""

from dataclasses import replace

import dspy
import pytest
from dspy.utils import DummyLM

from modpo.errors import PolicyError
from modpo.optimizers import MMGRPO, FlowGRPO
from modpo.store import Store
from tests.e2e.model import (
    HINTS,
    REPLIES,
    Terse,
    adapter_files,
    calls_of,
    heldout,
    policy,
    program,
    right,
    traces,
    trainset,
)
from tests.tiny import tiny_tokenizer

SMALL = {"steps": 2, "examples_per_step": 4, "rollouts_per_example": 4, "learning_rate": 5e-3, "quiet": True}


def small(tmp_path, kind=MMGRPO, **options):
    return kind(right, run_folder=tmp_path / "run", **{**SMALL, **options})


def calls_in(run, steps):
    with Store.open(run) as store:
        return [call for step in range(steps) for rollout in store.rollouts(step) for call in rollout.calls]


def solver():
    """An LM that is no policy and knows every reply."""
    return DummyLM({f"<h>\n{hint}\n</h>": {"r": reply} for hint, reply in REPLIES.items()}, adapter=Terse())


def planner():
    asks = {f"<q>\n{e.q}\n</q>": {"h": HINTS[e.q[0]]} for e in (*trainset(), *heldout())}
    return DummyLM(asks, adapter=Terse())


def test_mmgrpo_raises_the_heldout_score(trained):
    result = trained.optimizer.result
    assert result.before == 0.5
    assert result.warm == 0.5
    assert result.after >= 0.8
    assert result.ci95_gain[0] > 0
    assert min(result.versions.values()) > 0
    assert set(result.versions) == {"plan", "solve"}


def test_the_compiled_program_answers_as_its_score_says(trained):
    answers = [right(example, trained.compiled(q=example.q)) for example in heldout()]
    assert sum(answers) / len(answers) == trained.optimizer.result.after
    assert trained.compiled._compiled
    assert trained.compiled.modpo_run == trained.run
    assert "@v" in trained.compiled.plan.lm.model


def test_the_student_answers_as_before(trained):
    assert calls_of(trained.student, heldout()) == trained.before
    assert trained.student.plan.lm.adapter is None
    assert not getattr(trained.student, "_compiled", False)


def test_a_compiled_program_can_be_compiled_further(trained, tmp_path):
    optimizer = small(tmp_path, steps=0)
    further = optimizer.compile(trained.compiled, trainset=trainset(), valset=heldout())
    assert optimizer.result.before == trained.optimizer.result.after
    ids = [call[2:] for call in calls_of(further, heldout())]
    assert ids == [call[2:] for call in calls_of(trained.compiled, heldout())]


def test_flow_grpo_raises_the_heldout_score(base, tmp_path):
    optimizer = small(tmp_path, FlowGRPO, steps=8, examples_per_step=8, rollouts_per_example=8, validate_every=4)
    optimizer.compile(program(policy(base)), trainset=trainset(), valset=heldout())
    assert optimizer.result.before == 0.5
    assert optimizer.result.after >= 0.7


def test_a_frozen_module_is_recorded_and_not_trained(base, tmp_path):
    student = program(policy(base))
    student.solve.set_lm(solver())
    optimizer = small(tmp_path)
    compiled = optimizer.compile(student, trainset=trainset())
    assert set(optimizer.result.versions) == {"plan"}
    assert isinstance(compiled.solve.lm, DummyLM)
    frozen = [call for call in calls_in(tmp_path / "run", 2) if call.module == "solve"]
    assert all(call.adapter is None and not call.prompt_ids for call in frozen)
    answered = [call.text for call in frozen if call.parsed]
    assert len(answered) > len(frozen) / 2
    assert set(answered) <= {f"<r>\n{reply}\n</r>" for reply in REPLIES.values()}


def test_modules_may_share_an_adapter(base, tmp_path):
    optimizer = small(tmp_path)
    optimizer.compile(program(policy(base, adapters="shared")), trainset=trainset())
    assert optimizer.result.versions == {"shared": 2}
    assert {(call.module, call.adapter) for call in calls_in(tmp_path / "run", 2)} == {
        ("plan", "shared"),
        ("solve", "shared"),
    }


def test_a_mapping_leaves_the_other_modules_to_the_base(base, tmp_path):
    optimizer = small(tmp_path)
    compiled = optimizer.compile(program(policy(base, adapters={"plan": "mine"})), trainset=trainset())
    assert optimizer.result.versions == {"mine": 2}
    assert {(call.module, call.adapter) for call in calls_in(tmp_path / "run", 2)} == {
        ("plan", "mine"),
        ("solve", None),
    }
    assert compiled.solve.lm.adapter is None


def test_demos_stay_in_the_trained_prompt(base, tmp_path):
    student = program(policy(base))
    student.plan.demos = [dspy.Example(q="g9", h="n")]
    compiled = small(tmp_path, steps=1).compile(student, trainset=trainset())
    sampled = [call for call in calls_in(tmp_path / "run", 1) if call.module == "plan"]
    served = {tuple(call[2]) for call in calls_of(compiled, trainset()) if call[0] == "plan"}
    assert {call.prompt_ids for call in sampled} <= served
    assert all("<q>\ng9\n</q>" in tiny_tokenizer().decode(list(call.prompt_ids)) for call in sampled)


def test_patience_stops_a_run_without_gain(base, tmp_path):
    optimizer = small(tmp_path, steps=9, learning_rate=0.0, validate_every=1, patience=2)
    optimizer.compile(program(policy(base)), trainset=trainset(), valset=heldout()[:4])
    assert optimizer.result.steps == 2
    assert optimizer.result.versions == {"plan": 0, "solve": 0}


def test_a_time_limit_ends_a_run_in_time_with_its_scores_and_may_be_raised(base, tmp_path):
    optimizer = small(tmp_path, time_limit_s=1e-3)
    optimizer.compile(program(policy(base)), trainset=trainset(), valset=heldout()[:4])
    assert optimizer.result.steps == 0
    assert optimizer.result.after is not None
    optimizer = small(tmp_path, time_limit_s=600.0, resume=True)
    optimizer.compile(program(policy(base)), trainset=trainset(), valset=heldout()[:4])
    assert optimizer.result.steps == 2


def test_validation_keeps_the_best_version(base, tmp_path):
    optimizer = small(tmp_path, steps=2, learning_rate=1.0, validate_every=1)  # a rate that breaks the model
    student = program(policy(base))
    compiled = optimizer.compile(student, trainset=trainset(), valset=heldout())
    with Store.open(tmp_path / "run") as store:
        scores = [made.mean for made in store.validations() if made.label == "step"]
    assert max(scores[1:]) < scores[0]
    assert optimizer.result.versions == {"plan": 0, "solve": 0}
    assert optimizer.result.after == scores[0] == 0.5
    assert calls_of(compiled, heldout()[:2])[0][2:] == calls_of(student, heldout()[:2])[0][2:]


def test_a_warm_start_learns_from_a_teachers_successful_rollouts(base, tmp_path):
    student, teacher = program(policy(base)), program(policy(base))
    teacher.plan.set_lm(planner())
    teacher.solve.set_lm(solver())
    optimizer = small(tmp_path, steps=0, warm_start={"epochs": 3, "learning_rate": 5e-3})
    optimizer.compile(student, trainset=trainset(), valset=heldout(), teacher=teacher)
    assert optimizer.result.before == 0.5
    assert optimizer.result.warm >= 0.9
    assert optimizer.result.after == optimizer.result.warm


def test_a_warm_start_learns_from_traces(base, tmp_path):
    optimizer = small(tmp_path, steps=0, traces=traces(), warm_start={"epochs": 6, "learning_rate": 5e-3})
    optimizer.compile(program(policy(base)), trainset=trainset(), valset=heldout())
    assert optimizer.result.warm >= 0.9
    assert optimizer.result.versions == {"plan": 6, "solve": 6}


def test_two_deterministic_runs_are_equal_to_the_last_bit(base, tmp_path):
    made = []
    for name in ("one", "two"):
        run = tmp_path / name
        optimizer = MMGRPO(right, run_folder=run, deterministic=True, **SMALL)
        optimizer.compile(program(policy(base)), trainset=trainset(), valset=heldout()[:4])
        with Store.open(run) as store:
            rollouts = [store.rollouts(step) for step in range(2)]
        timeless = [[replace(r, seconds=0.0, calls=()) for r in step] for step in rollouts]
        ids = [[(c.completion_ids, c.logprobs) for r in step for c in r.calls] for step in rollouts]
        made.append((timeless, ids, adapter_files(run)))
    assert made[0] == made[1]


def test_a_setting_of_a_compile_call_counts(base, tmp_path):
    optimizer = small(tmp_path, steps=1)
    optimizer.compile(program(policy(base)), trainset=trainset(), seed=7, num_threads=3)
    with Store.open(tmp_path / "run") as store:
        assert store.run().settings["seed"] == 7
        assert store.run().settings["threads"] == 3


def test_a_policy_of_its_own_per_module_is_refused(base, tmp_path):
    student = program(policy(base))
    student.solve.set_lm(policy(base).lm())
    with pytest.raises(PolicyError, match="2 policies"):
        small(tmp_path).compile(student, trainset=trainset())
    assert not (tmp_path / "run").exists()
