"""Inside dspy.BetterTogether, after a prompt optimizer."""

import dspy

from modpo.optimizers import MMGRPO
from tests.e2e.model import calls_of, heldout, policy, program, right, trainset


def test_weights_are_trained_after_the_prompts(base, tmp_path):
    student = program(policy(base))
    before = calls_of(student, heldout()[:4])
    weights = MMGRPO(
        right, run_folder=tmp_path / "run", steps=6, examples_per_step=8, rollouts_per_example=8,
        learning_rate=5e-3, validate_every=3, quiet=True,
    )  # fmt: skip
    both = dspy.BetterTogether(metric=right, p=dspy.LabeledFewShot(k=1), w=weights)
    made = both.compile(
        student,
        trainset=trainset(),
        valset=heldout(),
        strategy="p -> w",
        num_threads=8,
        shuffle_trainset_between_steps=False,
    )
    scores = {each["strategy"]: each["score"] for each in made.candidate_programs}
    assert set(scores) == {"", "p", "p -> w"}
    assert scores["p -> w"] == max(scores.values()) >= scores[""] + 20
    assert made.plan.lm.version > 0
    assert made.plan.demos  # of the prompt optimizer, in the prompts that were trained
    baseline = next(each["program"] for each in made.candidate_programs if each["strategy"] == "")
    assert baseline.plan.lm.version is None
    assert calls_of(baseline, heldout()[:4]) == before
    answers = [right(example, made(q=example.q)) for example in heldout()]
    assert 100 * sum(answers) / len(answers) == scores["p -> w"]
