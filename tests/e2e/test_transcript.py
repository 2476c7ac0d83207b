"""`modpo show RUN --rollout`: one rollout of a real run, turn by turn."""

import json

import pytest

from modpo.errors import StoreError
from modpo.optimizers import FlowGRPO
from modpo.store import Store
from modpo.transcript import transcript
from tests.e2e.cli import modpo
from tests.e2e.model import heldout, policy, trainset
from tests.e2e.test_turns_e2e import Retry, judged


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    student = Retry()
    student.set_lm(policy(base).lm(max_tokens=12))
    folder = tmp_path_factory.mktemp("transcript") / "run"
    optimizer = FlowGRPO(
        judged, recipe="gtpo", run_folder=folder, steps=1, examples_per_step=6, rollouts_per_example=6,
        learning_rate=5e-3, quiet=True,
    )  # fmt: skip
    optimizer.compile(student, trainset=trainset(), valset=heldout()[:4])
    return folder


def longest(run):
    """Index and rollout with the most turns."""
    with Store.open(run) as store:
        return max(enumerate(store.rollouts(0)), key=lambda one: len(one[1].turn_scores or ()))


def test_it_tells_each_call_in_the_order_of_the_turns(run):
    index, rollout = longest(run)
    with Store.open(run) as store:
        told = transcript(store, f"0:{index}")
        advantages = store.advantages(0)
    assert len(told["turns"]) == len(rollout.turn_scores) > 1
    assert [turn["score"] for turn in told["turns"]] == list(rollout.turn_scores)
    assert [[call["module"] for call in turn["calls"]] for turn in told["turns"]] == [["plan", "solve"]] * len(
        told["turns"]
    )
    for k, turn in enumerate(told["turns"]):
        for call in turn["calls"]:
            at = next(c for c, one in enumerate(rollout.calls) if (one.module, one.occurrence) == (call["module"], k))
            assert call["said"] == rollout.calls[at].text
            assert call["advantage"] == advantages[index, at]
            assert call["reward"] == rollout.reward
            assert call["model"] == f"{call['module']}@v0"


def test_what_was_asked_is_what_differs_from_the_module_s_other_prompts(run):
    index, rollout = longest(run)
    with Store.open(run) as store:
        plan, solve = transcript(store, str(index))["turns"][0]["calls"]
    asked = trainset()[rollout.example].q
    assert plan["asked"].splitlines()[0] == asked
    assert "hint" not in plan["asked"]  # the instructions, which all prompts share
    assert solve["asked"].splitlines()[0] == plan["said"].splitlines()[1]


def test_the_command_line_prints_it(run):
    index, rollout = longest(run)
    shown = modpo("show", str(run), "--rollout", f"0:{index}")
    assert shown.returncode == 0, shown.stderr
    assert f"rollout 0:{index}, example {rollout.example}" in shown.stdout
    assert shown.stdout.index("turn 1, score -0.1") < shown.stdout.index("turn 2")
    assert "solve (solve@v0), reward" in shown.stdout
    told = modpo("show", str(run), "--rollout", f"0:{index}", "--json")
    assert json.loads(told.stdout)["rollout"] == f"0:{index}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("0:99", "step 0 has indices 0 to 35"),
        ("7:0", "the last one done is 0"),
        ("x", "neither STEP:INDEX"),
        ("-1", "neither STEP:INDEX"),
    ],
)
def test_a_rollout_that_is_not_there_is_refused(run, name, message):
    with Store.open(run) as store:
        with pytest.raises(StoreError, match=message):
            transcript(store, name)
