import dspy
import pytest

from modpo.errors import MetricError, TaskError
from modpo.optimizers.checks import probe, traces_of


class Copy(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = dspy.Predict("question -> word")
        self.second = dspy.Predict("word -> answer")

    def forward(self, question: str) -> dspy.Prediction:
        return self.second(word=self.first(question=question).word)


EXAMPLES = [dspy.Example(question=f"q{at}", answer=str(at)).with_inputs("question") for at in range(4)]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "0.5"])
def test_a_metric_without_a_number_is_found_by_one_example(value: object) -> None:
    with pytest.raises(MetricError, match="example 0"):
        probe(lambda example, prediction, trace=None: value, EXAMPLES[0])


def test_a_metric_that_needs_more_than_the_labels_is_not_judged_by_them() -> None:
    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> float:
        return float(prediction.reasoning)  # the labels have none: raises

    probe(metric, EXAMPLES[0])  # no error
    with pytest.raises(AttributeError):
        metric(EXAMPLES[0], dspy.Prediction(**EXAMPLES[0].labels()))


def teacher() -> dspy.Module:
    program = Copy()
    program.first.set_lm(dspy.utils.DummyLM([{"word": f"w{at}"} for at in range(4)]))
    program.second.set_lm(dspy.utils.DummyLM([{"answer": str(at % 2)} for at in range(4)]))
    return program


def metric(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> float:
    return float(example.answer == prediction.answer)


def test_only_a_teachers_successful_runs_become_traces() -> None:
    traces = traces_of(teacher(), EXAMPLES, metric, ("first", "second"), 1.0)
    # it answers 0, 1, 0, 1 to questions whose answers are 0, 1, 2, 3
    assert [dict(one) for one in traces["first"]] == [
        {"question": "q0", "word": "w0"},
        {"question": "q1", "word": "w1"},
    ]
    assert [dict(one) for one in traces["second"]] == [{"word": "w0", "answer": "0"}, {"word": "w1", "answer": "1"}]
    assert set(traces["second"][0].inputs().keys()) == {"word"}


def test_a_teacher_must_have_the_modules_and_succeed() -> None:
    with pytest.raises(TaskError, match="no module 'third'"):
        traces_of(teacher(), EXAMPLES, metric, ("third",), 1.0)
    with pytest.raises(TaskError, match="no run of the teacher"):
        traces_of(teacher(), EXAMPLES[2:], lambda *_, **__: 0.0, ("first",), 1.0)
