"""Turn credit and further measures on a real (tiny) model: what is stored is what the maths says, and it trains."""

import dspy
import pytest

from modpo.credit import assign, recipe
from modpo.errors import MetricError
from modpo.optimizers import FlowGRPO
from modpo.store import Store
from tests.e2e.model import TersePredict, heldout, policy, right, trainset

TURN_RECIPES = ("flow_grpo", "gtpo", "gigpo", "gagpo")


class Retry(dspy.Module):
    """Plan and solve, again where the reply was none of 1 and 2: one to three turns."""

    def __init__(self):
        super().__init__()
        self.plan = TersePredict(dspy.Signature("q -> h", "hint"))
        self.solve = TersePredict(dspy.Signature("h -> r", "reply"))

    def forward(self, q):
        replies = []
        for _ in range(3):
            replies.append(self.solve(h=self.plan(q=q).h).r)
            if replies[-1] in ("1", "2"):
                break
        return dspy.Prediction(r=replies[-1], replies=replies)


def judged(example, prediction, trace=None):
    """Right at last, with a score and a state per turn; a wrong turn costs a little."""
    replies = prediction.get("replies", [example.r])
    scores = [-0.1] * (len(replies) - 1) + [right(example, prediction)]
    states = ["start", *(f"after {reply}" for reply in replies[:-1])]
    return dspy.Prediction(
        score=scores[-1], turn_scores=scores, turn_states=states, measures={"turns": len(replies), "wrong": 0.5}
    )


@pytest.mark.parametrize("name", TURN_RECIPES)
def test_a_step_is_credited_as_the_recipe_says_and_kept(base, tmp_path, name):
    student = Retry()
    student.set_lm(policy(base).lm(max_tokens=12))
    optimizer = FlowGRPO(
        judged, recipe=name, run_folder=tmp_path / "run", steps=1, examples_per_step=6, rollouts_per_example=6,
        learning_rate=5e-3, temperature=1.0, quiet=True,
    )  # fmt: skip
    optimizer.compile(student, trainset=trainset(), valset=heldout()[:6])
    with Store.open(tmp_path / "run") as store:
        rollouts = store.rollouts(0)
        kept = store.advantages(0)
        (step,) = store.steps("train")
        measured = store.validations()[-1].measures
    turns = {len(rollout.turn_scores) for rollout in rollouts if rollout.turn_scores}
    assert len(turns) > 1  # unequal numbers of turns
    made = assign(recipe(name), rollouts, {"plan", "solve"})
    assert kept == {(one.member.rollout, one.member.call): one.advantage for one in made.credited}
    assert any(kept.values())
    assert set(optimizer.result.versions.values()) <= {0, 1}
    assert step.metrics["plan.grad_norm"] > 0
    assert measured["wrong"] == 0.5
    assert optimizer.result.measures["after"]["turns"] == measured["turns"] >= 1


def test_a_metric_that_miscounted_turns_can_be_mended(base, tmp_path):
    """What was sampled before is judged anew: the run would stop at the same rollouts for ever."""

    def miscounted(example, prediction, trace=None):
        told = judged(example, prediction)
        return dspy.Prediction(score=told.score, turn_scores=[*told.turn_scores, 0.0])

    student = Retry()
    student.set_lm(policy(base).lm(max_tokens=12))
    options = {
        "recipe": "gtpo", "run_folder": tmp_path / "run", "steps": 1, "examples_per_step": 3, "rollouts_per_example": 3,
        "temperature": 1.0, "quiet": True,
    }  # fmt: skip
    with pytest.raises(MetricError, match="turn_scores for example"):
        FlowGRPO(miscounted, **options).compile(student, trainset=trainset())
    FlowGRPO(judged, **options, resume=True).compile(student, trainset=trainset())
    with Store.open(tmp_path / "run") as store:
        assert store.last_done_step("train") == 0
        assert all(len(r.turn_scores) == len(r.turn_states) for r in store.rollouts(0) if r.failure is None)
