"""The demo's program, tools, data and traces."""

import random
import re
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy.utils.dummies import DummyLM

pytest.importorskip("reasoning_gym", reason="the demo needs modpo[demo]")

from modpo.programs import demo
from modpo.programs.legs import Legs
from modpo.programs.tools import calculator
from modpo.task import Task

QUESTION = "Count the legs.\n\nNow, how many legs are there in total if you have 3 spiders, 2 horses?\n"


@pytest.fixture(scope="module")
def task() -> Task:
    return demo.task(seed=1)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3 * 8 + 2 * 4", "32"),
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("1 / 2", "0.5"),
        ("4 / 2", "2"),
        ("-3 + 1", "-2"),
        ("7 // 2 + 7 % 2", "4"),
        ("2 ** 10", "1024"),
        (" 15 * 0\n", "0"),
    ],
)
def test_calculator_evaluates_arithmetic(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')",
        "open('/etc/passwd')",
        "().__class__",
        "x + 1",
        "5 (3)",
        "1, 2",
        "'a' * 9",
        "9 ** 9 ** 9",
        "(9 ** 9) ** (9 ** 9)",
        "2 ** 33",
        "(-1) ** 0.5",
        "1 / 0",
        "0 ** -1",
        "3 * 8 +",
        "3 3",
        "(" * 50 + "1",
        "1" * 121,
        "1\x00",
        "",
        "thirty-two",
    ],
)
def test_calculator_refuses_everything_else_with_a_value_error(expression: str) -> None:
    with pytest.raises(ValueError, match="expression|cannot evaluate"):
        calculator(expression)


def run(answers: list[dict[str, str]]) -> tuple[dspy.Prediction, list[str]]:
    """Run the program with scripted modules; return its prediction and the last message of each call."""
    program = Legs()
    lm = DummyLM(answers, adapter=dspy.XMLAdapter())
    program.set_lm(lm)
    prediction = program(question=QUESTION)
    return prediction, [entry["messages"][-1]["content"] for entry in lm.history]


def test_the_program_answers_in_three_calls_when_the_verifier_accepts() -> None:
    answers = [{"plan": "spider 8, horse 4"}, {"expression": "3 * 8 + 2 * 4"}, {"ok": "yes"}]
    prediction, prompts = run(answers)
    assert prediction.answer == "32"
    assert len(prompts) == 3
    assert "<plan>\nspider 8, horse 4\n</plan>" in prompts[1]
    assert "<expression>\n3 * 8 + 2 * 4\n</expression>" in prompts[2]
    assert demo.score(dspy.Example(answer="32"), prediction) == 1.0


def test_a_rejection_lets_the_executor_try_once_more_and_says_what_was_rejected() -> None:
    prediction, prompts = run(
        [
            {"plan": "spider 8, horse 4"},
            {"expression": "2 * 8 + 2 * 4"},
            {"ok": "No"},
            {"expression": "3 * 8 + 2 * 4"},
        ]
    )
    assert prediction.answer == "32"
    assert len(prompts) == 4
    assert "spider 8, horse 4 (not 2 * 8 + 2 * 4)" in prompts[3]


def test_an_expression_the_calculator_refuses_ends_the_run() -> None:
    with pytest.raises(ValueError, match="no arithmetic expression"):
        run([{"plan": "spider 8, horse 4"}, {"expression": "twenty-four"}, {"ok": "yes"}])


def test_the_modules_have_the_paths_the_traces_name(task: Task) -> None:
    paths = {path: predictor.signature for path, predictor in task.program.named_predictors()}
    assert task.traces is not None
    assert set(paths) == set(task.traces) == {"planner", "executor", "verifier"}
    for path, examples in task.traces.items():
        for example in examples:
            assert set(example.inputs()) == set(paths[path].input_fields)
            assert set(example.labels()) == set(paths[path].output_fields)


def animals(question: str) -> list[tuple[int, str]]:
    """Read counts and animals back out of a question's text."""
    return [(int(n), name) for n, name in re.findall(r"(\d+) ([a-z ]+?)(?=,|\?)", question)]


def test_no_two_questions_have_the_same_animals_in_the_same_numbers(task: Task) -> None:
    assert task.valset is not None
    assert task.testset is not None
    assert task.traces is not None
    assert len(task.trainset) >= 300
    assert len(task.testset) >= 200
    traces = [example for examples in task.traces.values() for example in examples]
    asked = [e.question for e in [*task.trainset, *task.valset, *task.testset, *traces]]
    keys = [frozenset(animals(question)) for question in asked]
    assert all(1 <= len(key) <= 2 for key in keys)
    assert len(set(keys)) == len(keys) == demo.TRAIN + demo.VAL + demo.TEST + 3 * demo.TRACES


def facts(plan: str) -> list[int]:
    """Read the legs out of a plan, without what was rejected."""
    return [int(number) for number in re.findall(r" (\d+)(?=,|$)", plan.partition(" (not ")[0])]


def follows(example: Any) -> bool:
    """Say whether an expression is the sum of the question's counts times the plan's legs."""
    counts = [count for count, _ in animals(example.question)]
    wanted = [(count, number) for count, number in zip(counts, facts(example.plan), strict=True)]
    return bool(example.expression == demo.write_sum(wanted))


def test_planner_traces_are_right_by_reasoning_gyms_scorer_and_show_12_animals(task: Task) -> None:
    import reasoning_gym

    assert task.traces is not None
    score = reasoning_gym.get_score_answer_fn("leg_counting")
    shown = set()
    for example in task.traces["planner"]:
        counts = [count for count, _ in animals(example.question)]
        names = re.findall(r"([a-z ]+?) \d+(?=,|$)", example.plan)
        shown |= {name.strip() for name in names}
        total = sum(count * demo.legs()[name.strip()] for count, name in zip(counts, names, strict=True))
        answer = calculator(demo.write_sum(list(zip(counts, facts(example.plan), strict=True))))
        assert score(answer=answer, entry={"answer": str(total)}) == 1.0
    assert len(shown) == 12
    assert {demo.legs()[name] for name in shown} == set(demo.legs().values())


def test_executor_traces_follow_their_plans_whose_facts_are_random(task: Task) -> None:
    assert task.traces is not None
    examples = task.traces["executor"]
    assert all(follows(example) for example in examples)
    second = [example for example in examples if "(not " in example.plan]
    assert 10 <= len(second) <= 40
    assert all(f"(not {example.expression})" not in example.plan for example in second)
    assert {number for example in examples for number in facts(example.plan)} == {0, 2, 4, 5, 6, 8, 10, 14}


def test_verifier_traces_accept_exactly_what_follows(task: Task) -> None:
    assert task.traces is not None
    examples = task.traces["verifier"]
    assert [follows(example) for example in examples] == [example.ok == "yes" for example in examples]
    assert 60 <= sum(example.ok == "yes" for example in examples) <= 84


def test_the_task_is_a_function_of_its_seed() -> None:
    def content(task: Task) -> list[Any]:
        return [dict(example) for example in task.trainset]

    assert content(demo.task(seed=3)) == content(demo.task(seed=3))
    assert content(demo.task(seed=3)) != content(demo.task(seed=4))
    assert {len(animals(e.question)) for e in demo.mixtures().trainset} == {2, 3, 4}


def test_score_is_reasoning_gyms_own() -> None:
    example = dspy.Example(answer="24")
    assert demo.score(example, dspy.Prediction(answer="24")) == 1.0
    assert demo.score(example, dspy.Prediction(answer="25")) == 0.0
    assert demo.score(example, dspy.Prediction(answer="1240")) == 0.5  # contains it: 2 of 4 characters


def test_known_animals_differ_by_seed() -> None:
    one, other = (demo.known_animals(random.Random(seed)) for seed in (1, 2))
    assert len(one) == len(other) == 12
    assert one != other


def test_the_demo_is_a_target_of_the_command_line() -> None:
    from modpo.task import load_task

    assert load_task("modpo.programs.demo:task").name == "legs"
    assert load_task(f"{Path(demo.__file__)}:mixtures").name == "legs"
