"""The reasoning-gym task of AgentFlow: its questions, its tools, what its traces show and what they leave open."""

from collections import Counter

import dspy
import pytest

from modpo.programs.agentflow import gym
from modpo.programs.agentflow.memory import EMPTY


@pytest.fixture(scope="module")
def task():
    return gym.task(3)


def test_splits_have_every_family_and_share_no_question(task):
    splits = (task.trainset, task.valset, task.testset)
    assert [len(split) for split in splits] == [400, 64, 200]
    questions = [example.question for split in splits for example in split]
    assert len(set(questions)) == len(questions)
    for split in splits:
        counts = Counter(example.dataset for example in split)
        assert set(counts) == {"products", "gcd", "lcm", "count_primes"}
        assert min(counts.values()) > len(split) / 8


def test_no_trace_is_of_a_question_of_the_splits(task):
    asked = {example.question for split in (task.trainset, task.valset, task.testset) for example in split}
    assert not asked & {trace.question for trace in task.traces["planner"]}
    other = {example.question for example in gym.task(4).testset}
    assert len(other & {example.question for example in task.testset}) < 50  # another seed draws other questions


def test_the_right_tool_and_command_answer_each_question(task):
    tools = task.program.tools
    own = {"products": "calculator", "gcd": "gcd", "lcm": "lcm", "count_primes": "primes"}
    for example in task.testset:
        tool = tools[own[example.dataset]]
        result = tool.run(gym.write_command(tool.describe(), example.numbers, right=True))
        assert not result.error
        assert gym.score(example, dspy.Prediction(answer=result.text)).score == 1.0


def test_the_other_form_of_a_command_is_an_error_with_every_tool(task):
    for tool in task.program.tools.values():
        assert tool.run(gym.write_command(tool.describe(), [12, 34], right=False)).error


def test_the_planner_s_traces_show_the_tool_of_one_family_only(task):
    chosen: dict[str, Counter[str]] = {}
    for trace in task.traces["planner"]:
        family = "products" if "multiplication" in trace.question else "another"
        chosen.setdefault(family, Counter())[trace.tool] += 1
    assert set(chosen["products"]) == {"calculator"}
    shares = [count / chosen["another"].total() for count in chosen["another"].values()]
    assert len(shares) == 4
    assert max(shares) < 0.5


def test_the_executor_s_traces_show_both_forms_about_equally_often(task):
    forms = Counter("{" in trace.command or " * " in trace.command for trace in task.traces["executor"])
    assert 0.3 < forms[True] / forms.total() < 0.7


def test_the_verifier_s_and_the_generator_s_traces_are_right(task):
    for trace in task.traces["verifier"]:
        failed = trace.memory == EMPTY or "-> error: " in trace.memory.splitlines()[-1]
        assert trace.verdict == ("continue" if failed else "stop")
    for trace in task.traces["generator"]:
        last = trace.memory.splitlines()[-1]
        assert last.endswith(f"-> {trace.answer}") or (trace.answer == "none" and "-> error: " in last)
    assert any("\n" in trace.memory for trace in task.traces["generator"])


def test_only_the_whole_answer_is_a_success_and_turns_are_measured():
    example = dspy.Example(question="q", answer="12", dataset="gcd").with_inputs("question")
    turns = [{"error": True}, {"error": False}]
    found = gym.score(example, dspy.Prediction(answer=" 12 ", turns=turns))
    assert (found.score, found.measures) == (1.0, {"turns": 2, "tool_errors": 0.5})
    assert gym.score(example, dspy.Prediction(answer="it is 12", turns=turns)).score == 0.0


def test_primes_are_counted_within_bounds():
    assert gym.primes(2, 10) == 4
    assert gym.primes(-5, 2) == 1
    assert gym.primes(50, 10) == 0
    assert gym.primes(99_990, 10**12) == gym.primes(99_990, 100_000)
