import threading
import time
from fractions import Fraction

import dspy
import pytest

from modpo.errors import ConfigError, JudgeTimeoutError, MetricError, RolloutTimeoutError
from modpo.programs.judges import exact, numeric, reasoning_gym, within
from modpo.programs.judges.text import last_number, whole_number
from modpo.rollout import run
from tests.scripted import Simple, as_policy, jobs_for, slow_echo


def judged(metric, right, given, **more):
    return metric(dspy.Example(answer=right, **more), dspy.Prediction(answer=given))


@pytest.mark.parametrize(
    ("right", "given", "score"),
    [
        ("Karsk", "  “KARSK”. ", 1.0),
        ("the  Straße", "The\nSTRASSE!", 1.0),
        ("Karsk", "**Karsk**", 1.0),
        ("Karsk", "in Karsk", 0.0),
        ("5", "-5", 0.0),
        ("50", "50%", 0.0),
        ("3.5", "3.5.", 1.0),
        ("?", "!", 0.0),  # nothing is left of either
        (7, "7", 1.0),
    ],
)
def test_exact_looks_past_case_space_and_outer_punctuation_and_no_further(right, given, score):
    assert judged(exact(), right, given) == score


def test_exact_as_it_stands():
    assert judged(exact(normalise=False), "Karsk", "Karsk") == 1.0
    assert judged(exact(normalise=False), "Karsk", "karsk") == 0.0


def test_the_field_is_chosen_and_a_missing_one_is_said():
    example, prediction = dspy.Example(town="Karsk"), dspy.Prediction(town="karsk")
    assert exact("town")(example, prediction) == 1.0
    with pytest.raises(MetricError, match="the example has no 'answer' to judge; allowed: town"):
        exact()(example, prediction)
    with pytest.raises(MetricError, match="the prediction has no 'town' to judge; allowed: towns; did you mean"):
        exact("town")(example, dspy.Prediction(towns="x"))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the answers are 7 and 1,234,567.5.", Fraction(2469135, 2)),
        ("-3", Fraction(-3)),
        ("−3", Fraction(-3)),
        ("-$5", Fraction(-5)),
        ("10-5", Fraction(5)),  # a minus between numbers is no sign
        (".5", Fraction(1, 2)),
        ("1.2e-3", Fraction(12, 10_000)),
        ("1.2 x 10^-3", Fraction(12, 10_000)),
        (r"1.5\times 10^{3}", Fraction(1500)),
        ("so it is 3/4.", Fraction(3, 4)),
        ("50%", Fraction(1, 2)),
        ("1,2,3", Fraction(3)),
        ("H2", None),
        ("1/0", None),
        ("1e9999", None),
        ("9" * 300, None),
        ("none", None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


def test_a_whole_number_has_nothing_beside_it():
    assert whole_number(" 7/10 ") == Fraction(7, 10)
    assert whole_number("7 of 10") is None


def test_numeric_compares_within_its_tolerances():
    assert judged(numeric(), "84", "12 * 7 = 84 euros") == 1.0
    assert judged(numeric(), 0.5, "50 %") == 1.0
    assert judged(numeric(), "84", "no idea") == 0.0
    # a tenth of 50 is 5
    assert [judged(numeric(rel_tol=0.1), "50", each) for each in ("55", "45", "55.1")] == [1.0, 1.0, 0.0]
    assert [judged(numeric(rel_tol=0, abs_tol=0.5), "2", each) for each in ("2.5", "2.6")] == [1.0, 0.0]
    # 2**53 + 1 is no float
    assert judged(numeric(rel_tol=0), "9007199254740993", "9007199254740992") == 0.0
    with pytest.raises(MetricError, match="no number in the example's 'answer', which is 'many'"):
        judged(numeric(), "many", "3")
    with pytest.raises(ConfigError, match="rel_tol=-1"):
        numeric(rel_tol=-1)


def test_reasoning_gym_scores_by_the_data_set_that_is_named():
    # leg_counting gives 0.5 for "1240", which holds 24 in twice the characters
    example = {"right": "24", "question": "How many legs?", "dataset": "leg_counting"}
    assert [judged(reasoning_gym(), given=each, **example) for each in ("24", "25", "1240")] == [1.0, 0.0, 0.5]
    assert judged(reasoning_gym("leg_counting"), "24", "24") == 1.0
    with pytest.raises(MetricError, match="no data set 'leg_countin'.*did you mean 'leg_counting'"):
        reasoning_gym("leg_countin")
    with pytest.raises(MetricError, match="the example has no 'dataset'"):
        judged(reasoning_gym(), "24", "24")


def test_reasoning_gym_is_given_the_metadata():
    import reasoning_gym as library

    entry = library.create_dataset("countdown", size=1, seed=3)[0]  # any expression that comes to the target is right
    fields = {"right": entry["answer"], "metadata": entry["metadata"], "question": entry["question"]}
    metric = reasoning_gym("countdown")
    assert judged(metric, given=entry["metadata"]["expression"], **fields) == 1.0
    assert judged(metric, given="1", **fields) < 0.1


def test_within_passes_on_what_the_metric_gives_raises_and_is_given():
    def metric(example, prediction, trace):
        if prediction.answer is None:
            raise TimeoutError("the metric's own")
        return dspy.Prediction(score=0.5, feedback=f"{trace} {dspy.settings.lm}")

    with dspy.context(lm="the caller's"):
        assert judged(within(metric, 5), "a", "b").feedback == "None the caller's"
    assert within(metric, 5)(None, dspy.Prediction(answer="b"), trace=["call"]).feedback.startswith("['call']")
    with pytest.raises(TimeoutError, match="the metric's own"):
        judged(within(metric, 5), "a", None)
    assert within(lambda example, prediction: 1.0, 5)(None, None) == 1.0
    with pytest.raises(ConfigError, match="timeout_s=0; it must be above 0 seconds"):
        within(metric, 0)


def test_a_judge_that_hangs_is_data_and_the_run_goes_on():
    release = threading.Event()

    def stuck(example, prediction, trace=None):
        if example.tag == "e1":
            release.wait(30)
        return 1.0

    program = Simple()
    policy = as_policy(program, slow_echo)
    start = time.monotonic()
    rollouts = run(
        jobs_for(3), program=program, metric=within(stuck, 0.3), sampler=policy.sampler, threads=1,
        failure_reward=-1.0,
    )  # fmt: skip
    assert time.monotonic() - start < 20
    assert [(each.failure, each.reward) for each in rollouts] == [(None, 1.0), ("timeout", -1.0), (None, 1.0)]
    assert rollouts[1].error == "JudgeTimeoutError: the judge 'stuck' took longer than 0.3 s"
    assert len(rollouts[1].calls) == 2
    assert '"acted"' in rollouts[1].prediction
    assert policy.sampler.live == 0
    release.set()


def test_a_judge_s_time_out_is_known_by_its_cause_too():
    def metric(example, prediction):
        try:
            raise JudgeTimeoutError("late")
        except JudgeTimeoutError as error:
            raise ValueError("no verdict") from error

    program = Simple()
    (rollout,) = run(jobs_for(1), program=program, metric=metric, sampler=as_policy(program, slow_echo).sampler)
    assert rollout.failure == "timeout"
    assert issubclass(JudgeTimeoutError, RolloutTimeoutError)
