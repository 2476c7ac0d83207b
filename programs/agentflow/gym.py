"""A task for AgentFlow: four families of reasoning-gym, each of which needs a tool of its own.

The warm start is thin on purpose: it teaches each role its form, and leaves two things for the reward to find. Which
tool a family needs is shown for one family only; in the traces of the others the planner draws a tool. And of the two
ways to write a command that the executor's traces show equally often, the tool takes only one.
"""

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import dspy

from modpo.programs.agentflow.flow import AgentFlow
from modpo.programs.agentflow.memory import EMPTY
from modpo.programs.judges import reasoning_gym
from modpo.programs.questions import STRIDE, data_set
from modpo.programs.tools import calculator
from modpo.programs.xml import XMLPredict
from modpo.task import Metric, Task

TRAIN, VAL, TEST, TRACES = 400, 64, 200, 96
KNOWN = "products"
_FAMILIES: Mapping[str, Mapping[str, int]] = {
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 99},
    "lcm": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 99},
    "count_primes": {"min_n": 2, "max_n": 99},
}
_TOOL_OF = {"products": "calculator", "gcd": "gcd", "lcm": "lcm", "count_primes": "primes"}


class Choose(dspy.Signature):
    """Choose the tool: calculator, gcd, lcm or primes."""

    question: str = dspy.InputField()
    memory: str = dspy.InputField()
    tool: str = dspy.OutputField()


class Command(dspy.Signature):
    """Write the tool's command."""

    question: str = dspy.InputField()
    tool: str = dspy.InputField()
    command: str = dspy.OutputField()


class Judge(dspy.Signature):
    """Has the memory a result? Then stop, else continue."""

    memory: str = dspy.InputField()
    verdict: str = dspy.OutputField()


class Answer(dspy.Signature):
    """Answer with the last result, or none."""

    memory: str = dspy.InputField()
    answer: str = dspy.OutputField()


ROLES: Mapping[str, type[dspy.Signature]] = {
    "planner": Choose,
    "executor": Command,
    "verifier": Judge,
    "generator": Answer,
}


def gcd(a: int, b: int) -> int:
    """Greatest common divisor."""
    return math.gcd(a, b)


def lcm(a: int, b: int) -> int:
    """Least common multiple."""
    return math.lcm(a, b)


def primes(low: int, high: int) -> int:
    """Count the primes from low to high."""
    bounded = range(max(low, 2), min(high, 100_000) + 1)
    return sum(all(number % divisor for divisor in range(2, math.isqrt(number) + 1)) for number in bounded)


def program(predictor: Callable[[type[dspy.Signature]], dspy.Module] = XMLPredict) -> AgentFlow:
    """Make the program: at most three turns, and short prompts."""
    tools = (calculator, gcd, lcm, primes)
    return AgentFlow(tools, max_turns=3, memory_tokens=256, result_tokens=48, roles=ROLES, predictor=predictor)


def task(seed: int = 0) -> Task:
    """Make the task.

    Args:
        seed: of questions and traces.

    Returns:
        The task; no two of its questions are the same, and each split has all four families.
    """
    questions = draw_questions(seed)
    test, val, train = ([next(questions) for _ in range(size)] for size in (TEST, VAL, TRAIN))
    return Task(
        program=program(),
        metric=score,
        trainset=train,
        valset=val,
        testset=test,
        traces=traces(questions, random.Random(seed)),
        name="agentflow",
        optimizer="FlowGRPO",
    )


def score(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> dspy.Prediction:  # noqa: ARG001
    """Score 1 for the right answer by reasoning-gym's own judgement, else 0; measures turns and tool errors.

    Returns:
        `score`, and `measures`: `turns`, how many there were; `tool_errors`, the share of them that went wrong.
    """
    measures: dict[str, float] = {}
    if "turns" in prediction:  # absent where a metric is tried on labels alone
        failed = sum(turn["error"] for turn in prediction.turns)
        measures = {"turns": len(prediction.turns), "tool_errors": failed / max(len(prediction.turns), 1)}
    answer = dspy.Prediction(answer=str(prediction.answer).strip())
    return dspy.Prediction(score=float(_judge()(example, answer) == 1), measures=measures)


@cache
def _judge() -> Metric:
    return reasoning_gym()


def traces(questions: Iterator[dspy.Example], rng: random.Random, size: int = TRACES) -> dict[str, list[dspy.Example]]:
    """Show each role `size` answers: runs of the program itself, with teachers that know no more than said above."""
    shown: dict[str, list[dspy.Example]] = {role: [] for role in ROLES}
    while any(len(found) < size for found in shown.values()):
        example = next(questions)
        kept: dict[str, list[dspy.Example]] = {role: [] for role in ROLES}
        program(partial(_Teacher, example=example, kept=kept, rng=rng))(question=example.question)
        for role, found in kept.items():
            shown[role] += found
    return {role: found[:size] for role, found in shown.items()}


class _Teacher(dspy.Predict):
    """Plays one role on one question, and keeps what it was given and what it said."""

    def __init__(
        self,
        signature: type[dspy.Signature],
        example: dspy.Example,
        kept: dict[str, list[dspy.Example]],
        rng: random.Random,
    ) -> None:
        super().__init__(signature)
        self._role = next(role for role, known in ROLES.items() if known is signature)
        self._example, self._kept, self._rng = example, kept, rng

    def forward(self, **inputs: Any) -> dspy.Prediction:
        said = getattr(self, f"_as_{self._role}")(**inputs)
        self._kept[self._role].append(dspy.Example(**inputs, **said).with_inputs(*inputs))
        return dspy.Prediction(**said)

    def _as_planner(self, question: str, memory: str) -> dict[str, str]:
        known = self._example.dataset == KNOWN
        return {"tool": _TOOL_OF[KNOWN] if known else self._rng.choice(list(_TOOL_OF.values()))}

    def _as_executor(self, question: str, tool: str) -> dict[str, str]:
        return {"command": write_command(tool, self._example.numbers, right=self._rng.random() < 0.5)}

    def _as_verifier(self, memory: str) -> dict[str, str]:
        return {"verdict": "continue" if memory == EMPTY or "-> error: " in memory.splitlines()[-1] else "stop"}

    def _as_generator(self, memory: str) -> dict[str, str]:
        result = memory.splitlines()[-1].rpartition("-> ")[2]
        return {"answer": "none" if result.startswith("error: ") else result}


def write_command(card: str, numbers: list[int], *, right: bool) -> str:
    """Write a command for a tool, given as its description begins, in the form that it takes or in the other one."""
    name, low_high = card.partition("(")[0], dict(zip(("low", "high"), numbers, strict=True))
    first, second = numbers
    match name, right:
        case "calculator", True:
            return f"{first} * {second}"
        case "calculator", False:
            return f"{first} x {second}"
        case "primes", True:
            return json.dumps(low_high)
        case _, True:
            return json.dumps({"a": first, "b": second})
        case _:
            return f"{first}, {second}"


def draw_questions(seed: int) -> Iterator[dspy.Example]:
    """Yield reasoning-gym's questions, the families in turn, none twice."""
    sets = {family: data_set(family, seed, **options) for family, options in _FAMILIES.items()}
    seen: set[str] = set()
    for index in range(STRIDE):
        for family, data in sets.items():
            entry = data[index]
            question = entry["question"].partition(" Give only")[0].strip()
            if question not in seen:
                seen.add(question)
                numbers = _numbers(entry["metadata"])
                made = dspy.Example(question=question, answer=entry["answer"], dataset=family, numbers=numbers)
                yield made.with_inputs("question")


def _numbers(metadata: Mapping[str, Any]) -> list[int]:
    """The two numbers of a question."""
    if "expression" in metadata:
        return [int(part) for part in metadata["expression"].split(" * ")]
    return list(metadata.get("numbers") or (metadata["start"], metadata["end"]))
