import sys

import dspy
import pytest

from modpo.errors import ConfigError, MetricError, TaskError
from modpo.task import Task, apply_metric, as_score, check_examples, load_task, prediction_text

FILE = """
import dspy
from modpo.task import Task

def metric(example, prediction, trace=None):
    return 1.0

task = Task(program=dspy.Predict("question -> answer"), metric=metric, trainset=[], name="plain", settings={"steps": 3})

def made():
    return task

number = 7
"""


@pytest.fixture
def task_file(tmp_path):
    path = tmp_path / "my_task.py"
    path.write_text(FILE)
    yield path
    for name in ("modpo_task_my_task", "my_task"):
        sys.modules.pop(name, None)


def test_load_task_takes_a_task_and_a_function_that_returns_one(task_file):
    task = load_task(f"{task_file}:task")
    assert (task.name, task.settings) == ("plain", {"steps": 3})
    assert load_task(f"{task_file}:made") is task


def test_load_task_takes_a_package(task_file, monkeypatch):
    monkeypatch.syspath_prepend(task_file.parent)
    assert load_task("my_task:task").name == "plain"


def test_load_task_takes_a_toml_file_whose_paths_start_where_it_lies(task_file):
    toml = task_file.parent / "run.toml"
    toml.write_text('target = "my_task.py:task"\noptimizer = "mmgrpo"\nname = "other"\n[settings]\nseed = 5\n')
    task = load_task(str(toml))
    assert (task.optimizer, task.name, task.settings) == ("mmgrpo", "other", {"steps": 3, "seed": 5})


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing", "none of"),
        ("{dir}/my_tsk.py:task", "did you mean '{dir}/my_task.py'"),
        ("{dir}/my_task.py:tusk", "did you mean 'task'"),
        ("{dir}/my_task.py:number", "is a int, not a modpo.Task"),
        ("no_such_package_here:task", "no module 'no_such_package_here'"),
    ],
)
def test_load_task_says_what_is_wrong(task_file, target, message):
    with pytest.raises(TaskError) as error:
        load_task(target.format(dir=task_file.parent))
    assert message.format(dir=task_file.parent) in str(error.value)


def test_load_task_refuses_a_wrong_toml(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_task(str(tmp_path / "no.toml"))
    (tmp_path / "a.toml").write_text('targt = "x.py:task"')
    with pytest.raises(TaskError, match="did you mean 'target'"):
        load_task(str(tmp_path / "a.toml"))
    (tmp_path / "b.toml").write_text("[settings]\nsteps = 1")
    with pytest.raises(TaskError, match="needs a line like"):
        load_task(str(tmp_path / "b.toml"))


def test_a_broken_task_file_raises_its_own_error_each_time(tmp_path):
    path = tmp_path / "broken_task.py"
    path.write_text("1 / 0")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load_task(f"{path}:task")


@pytest.mark.parametrize(("value", "score"), [(True, 1.0), (False, 0.0), (3, 3.0), (0.25, 0.25)])
def test_as_score_reads_numbers(value, score):
    assert as_score(value, "example 0").score == score


def test_as_score_reads_feedback_and_turn_scores():
    score = as_score(dspy.Prediction(score=0.5, feedback="close", turn_scores=[1, 0]), "example 0")
    assert (score.score, score.feedback, score.turn_scores) == (0.5, "close", (1.0, 0.0))


@pytest.mark.parametrize(
    "value", [None, float("nan"), float("inf"), "1.0", [1.0], dspy.Prediction(feedback="x"), dspy.Prediction(score="1")]
)
def test_as_score_refuses_what_is_no_finite_number_and_names_the_example(value):
    with pytest.raises(MetricError, match="example 12"):
        as_score(value, "example 12")


def test_apply_metric_gives_none_for_further_arguments_it_insists_on():
    assert apply_metric(lambda example, prediction: (example, prediction), 1, 2) == (1, 2)
    assert apply_metric(lambda example, prediction, trace="unset": trace, 1, 2) == "unset"
    assert apply_metric(lambda gold, pred, trace, name, pred_trace: (trace, name, pred_trace), 1, 2) == (
        None,
        None,
        None,
    )


class _Program(dspy.Module):
    def forward(self, question, hint="none"):
        return question


class _Any(dspy.Module):
    def forward(self, **anything):
        return anything


def test_check_examples():
    good = dspy.Example(question="q", answer="a").with_inputs("question")
    check_examples(_Program(), [good])
    check_examples(_Any(), [good])
    check_examples(dspy.Predict("question -> answer"), [good])
    check_examples(dspy.ChainOfThought("question -> answer"), [good])
    with pytest.raises(TaskError, match="trainset is empty"):
        check_examples(_Program(), [])
    with pytest.raises(TaskError, match="example 1 of valset lacks the input 'question'.*not marked"):
        check_examples(_Program(), [good, dspy.Example(question="q", hint="h").with_inputs("hint")], "valset")
    with pytest.raises(TaskError, match="with_inputs"):
        check_examples(_Program(), [dspy.Example(question="q")])
    with pytest.raises(TaskError, match="does not take; .*did you mean 'question'"):
        check_examples(_Program(), [dspy.Example(question="q", questions="q").with_inputs("question", "questions")])
    with pytest.raises(TaskError, match="is a dict"):
        check_examples(_Program(), [{"question": "q"}])
    with pytest.raises(TaskError, match="lacks the input 'question'"):
        check_examples(dspy.Predict("question -> answer"), [dspy.Example(text="q").with_inputs("text")])


def test_a_task_is_frozen():
    task = Task(program=dspy.Predict("a -> b"), metric=max, trainset=[])
    with pytest.raises(AttributeError):
        task.name = "other"


def test_prediction_text_writes_anything():
    assert prediction_text(dspy.Prediction(answer="é", n=2)) == '{"answer": "é", "n": 2}'
    assert prediction_text({("a", 1): 2}) == "{('a', 1): 2}"
