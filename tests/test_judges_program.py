import threading
from concurrent.futures import ThreadPoolExecutor

import dspy
import pytest
from dspy.utils import DummyLM
from dspy.utils.exceptions import AdapterParseError

import modpo
from modpo.errors import JudgeTimeoutError, MetricError, TaskError
from modpo.lm.policy_lm import PolicyLM
from modpo.programs.judges import judged_by, lm_judge
from modpo.programs.judges.program import read_score
from modpo.rollout import run
from tests.scripted import Simple, as_policy, jobs_for, slow_echo
from tests.tiny import save_tiny

EXAMPLE = dspy.Example(question="Where?", answer="Karsk").with_inputs("question")
PREDICTION = dspy.Prediction(answer="karsk", notes="found")


class Judge(dspy.Module):
    """Keeps what it is given and gives what it is told."""

    def __init__(self, **outputs):
        super().__init__()
        self.outputs = outputs
        self.seen = []

    def forward(self, question, answer, notes="none", *, example_answer):
        self.seen.append((question, answer, notes, example_answer))
        return dspy.Prediction(**self.outputs)


def xml_lm(*answers):
    """An LM that answers with these verdicts, in turn."""
    return DummyLM([{"verdict": answer} for answer in answers], adapter=dspy.XMLAdapter())


def test_inputs_come_by_name_the_prediction_s_before_the_example_s():
    judge = Judge(score=0.25)
    assert judged_by(judge)(EXAMPLE, PREDICTION) == 0.25
    # `notes` has a default: only what the program needs is looked for
    assert judge.seen == [("Where?", "karsk", "none", "Karsk")]


def test_a_label_is_not_taken_for_an_answer_that_is_missing():
    judge = Judge(score=1.0)
    with pytest.raises(MetricError, match=r"input 'answer' is in none of these; allowed: example_answer, .* 'example_"):
        judged_by(judge)(EXAMPLE, dspy.Prediction(notes="died early"))
    with pytest.raises(MetricError, match="does not say which fields are inputs"):
        judged_by(judge)(dspy.Example(question="Where?"), PREDICTION)
    assert judge.seen == []


def test_feedback_comes_along():
    scored = judged_by(Judge(grade="No.", feedback="Karsk was meant"), score="grade")(EXAMPLE, PREDICTION)
    assert (scored.score, scored.feedback) == (0.0, "Karsk was meant")


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (True, 1.0),
        (False, 0.0),
        (0.25, 0.25),
        (1, 1.0),
        ("0.25", 0.25),
        ("7/10", 0.7),
        ("70%", 0.7),
        (" **Yes** ", 1.0),
        ("No.", 0.0),
        ("yes, both name Karsk", 1.0),
        ("False - it is another town", 0.0),
    ],
)
def test_a_score_is_a_number_or_a_verdict(value, score):
    assert read_score(value) == score


@pytest.mark.parametrize("value", [7, -0.1, float("nan"), "7 of 10", "perhaps", "", "yesterday", "nothing", [1]])
def test_any_other_score_is_refused(value):
    with pytest.raises(MetricError, match="must be a bool, a number of 0 .. 1, or yes or no"):
        read_score(value)


def test_an_output_that_is_not_there_is_said():
    with pytest.raises(TaskError, match="no output 'score'; allowed: verdict; name it with score="):
        judged_by(dspy.Predict("question -> verdict"))
    with pytest.raises(MetricError, match="the judge gave no 'score'; allowed: scores; did you mean 'scores'"):
        judged_by(Judge(scores=1))(EXAMPLE, PREDICTION)
    with pytest.raises(TaskError, match="the judge is a function, not a dspy.Module"):
        judged_by(lambda example: 1)


def test_a_judge_with_a_chain_of_thought():
    judge = dspy.ChainOfThought("question, example_answer, answer -> score: float, feedback")
    judge.set_lm(DummyLM([{"reasoning": "close", "score": "0.5", "feedback": "spell it right"}]))
    scored = judged_by(judge)(EXAMPLE, PREDICTION)
    assert (scored.score, scored.feedback) == (0.5, "spell it right")


def test_a_judge_that_hangs_is_given_up():
    class Stuck(Judge):
        def forward(self, question):
            threading.Event().wait(30)

    with pytest.raises(JudgeTimeoutError, match="took longer than 0.2 s"):
        judged_by(Stuck(), timeout_s=0.2)(EXAMPLE, PREDICTION)


def test_an_lm_is_asked_yes_or_no():
    lm = xml_lm("yes", "No, another town")
    metric = lm_judge(lm)
    assert [metric(EXAMPLE, PREDICTION), metric(EXAMPLE, PREDICTION)] == [1.0, 0.0]
    system, user = lm.history[0]["messages"]
    assert "Does the answer agree with the right one, example_answer?" in system["content"]
    assert user["content"] == (
        "<question>\nWhere?\n</question>\n\n<example_answer>\nKarsk\n</example_answer>\n\n<answer>\nkarsk\n</answer>"
    )


def test_an_lm_is_asked_what_it_is_told_to_ask():
    lm = xml_lm("0.5")
    assert lm_judge(lm, "How clear are the notes, 0 to 1?", inputs=("notes",))(EXAMPLE, PREDICTION) == 0.5
    assert lm.history[0]["messages"][1]["content"] == "<notes>\nfound\n</notes>"
    with pytest.raises(TaskError, match="the judge's LM is a str"):
        lm_judge("gpt")


def test_an_unparsable_verdict_is_data_of_the_rollout():
    def judge(example, prediction, trace=None):
        asked = dspy.Example(question=example.tag, answer="e0").with_inputs("question")
        return metric(asked, dspy.Prediction(answer=prediction.acted))

    metric = lm_judge(xml_lm("yes", "perhaps", "no"))
    program = Simple()
    sampler = as_policy(program, slow_echo).sampler
    rollouts = run(jobs_for(3), program=program, metric=judge, sampler=sampler, threads=1)
    assert sorted((each.failure or "", each.reward) for each in rollouts) == [("", 0.0), ("", 1.0), ("metric", 0.0)]
    (failed,) = [each for each in rollouts if each.failure]
    assert failed.error.startswith("MetricError: the judge's score is 'perhaps'")


def test_an_answer_without_the_form_is_an_error():
    lm = DummyLM([{"verdict": "yes"}])  # in another form than XML
    with pytest.raises(AdapterParseError):
        lm_judge(lm)(EXAMPLE, PREDICTION)


def test_64_threads_share_a_judge():
    metric = lm_judge(
        DummyLM({f"<answer>\n{at}\n": {"verdict": f"{at}/64"} for at in range(64)}, adapter=dspy.XMLAdapter())
    )
    with ThreadPoolExecutor(64) as threads:
        scores = list(threads.map(lambda at: metric(EXAMPLE, dspy.Prediction(answer=at)), range(64)))
    assert scores == [at / 64 for at in range(64)]


def test_a_local_policy_judges_while_rollouts_run():
    """The judge's calls are answered by its own policy, and are not the program's."""
    program = Simple()
    sampler = as_policy(program, slow_echo).sampler
    judge = Simple()
    judging = as_policy(judge, lambda request, prompt: "<verdict>\nyes\n</verdict>")

    def metric(example, prediction, trace=None):
        return lm_judge(PolicyLM(judging), inputs=("acted",))(example, prediction)

    rollouts = run(jobs_for(8), program=program, metric=metric, sampler=sampler)
    assert [each.reward for each in rollouts] == [1.0] * 8
    assert {len(each.calls) for each in rollouts} == {2}
    assert len(judging.sampler.requests) == 8


def test_a_real_model_as_judge_answers_or_its_rollout_says_why(tmp_path):
    policy = modpo.Policy(save_tiny(tmp_path / "tiny"), adapters={}, dtype="float32")
    program = Simple()
    sampler = as_policy(program, slow_echo).sampler
    metric = lm_judge(policy.lm(max_tokens=4), inputs=("acted",))
    rollouts = run(jobs_for(2), program=program, metric=metric, sampler=sampler)
    assert [each.failure for each in rollouts] == ["metric"] * 2  # random weights say nothing that parses
    assert all(each.error.startswith("AdapterParseError") for each in rollouts)
