"""The demo's task: `Legs` with data, traces and the metric of reasoning-gym's leg_counting.

Questions are drawn by reasoning-gym and scored by it. The warm start is thin on purpose: it teaches
the format, and the planner sees only 12 of the 37 animals, so the facts of the others are left for
the reward to find. The executor's plans have random facts, so that it learns to copy, not to know.
"""

import random
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import dspy

from modpo.programs.judges import reasoning_gym
from modpo.programs.legs import Legs, last_line, rejected
from modpo.programs.questions import STRIDE, data_set
from modpo.task import Metric, Task

TRAIN, VAL, TEST, TRACES = 400, 64, 200, 96
KNOWN_ANIMALS = 12


def task(seed: int = 0, animals: tuple[int, int] = (1, 2)) -> Task:
    """Make the demo's task.

    Args:
        seed: of questions and traces.
        animals: fewest and most kinds of animals in a question, 1 .. 37.

    Returns:
        The task; no two of its questions, traces included, have the same animals in the same numbers.
    """
    rng = random.Random(seed)
    questions = _questions(seed, animals)
    known = known_animals(rng)
    test, val, train = ([_example(next(questions)) for _ in range(size)] for size in (TEST, VAL, TRAIN))
    planner = _take(questions, TRACES, known)
    others = [next(questions) for _ in range(2 * TRACES)]
    return Task(
        program=Legs(),
        metric=score,
        trainset=train,
        valset=val,
        testset=test,
        traces={
            "planner": [plan_trace(entry) for entry in planner],
            "executor": [execute_trace(entry, rng) for entry in others[:TRACES]],
            "verifier": [verify_trace(entry, rng) for entry in others[TRACES:]],
        },
        name="legs",
    )


def mixtures() -> Task:
    """Make a harder task: questions of two to four kinds of animals."""
    return task(animals=(2, 4))


def score(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> float:  # noqa: ARG001
    """Score an answer as reasoning-gym does: 1 if right, less if the right number is a part of it, else 0."""
    return float(_judge()(example, prediction))


@cache
def _judge() -> Metric:
    return reasoning_gym("leg_counting")


def legs() -> Mapping[str, int]:
    """Return reasoning-gym's table of animals and their legs."""
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    table: Mapping[str, int] = ANIMALS
    return table


def known_animals(rng: random.Random) -> frozenset[str]:
    """Choose the animals whose legs the warm start shows: one of each number of legs, the rest at random."""
    table = legs()
    kinds = [sorted(a for a in table if table[a] == number) for number in sorted(set(table.values()))]
    chosen = {rng.choice(kind) for kind in kinds}
    rest = sorted(set(table) - chosen)
    return frozenset(chosen | set(rng.sample(rest, KNOWN_ANIMALS - len(chosen))))


def plan_trace(entry: Mapping[str, Any]) -> dspy.Example:
    """Show the planner a question and the true plan."""
    table = legs()
    plan = write_plan({animal: table[animal] for animal in _animals(entry)})
    return dspy.Example(question=last_line(entry["question"]), plan=plan).with_inputs("question")


def execute_trace(entry: Mapping[str, Any], rng: random.Random) -> dspy.Example:
    """Show the executor a plan with random facts and the sum that follows it; one in four after a rejection."""
    facts, sums = _random_facts(entry, rng)
    plan = write_plan(facts)
    if rng.random() < 0.25:
        plan = rejected(plan, _spoil(sums, rng))
    example = dspy.Example(question=last_line(entry["question"]), plan=plan, expression=write_sum(sums))
    return example.with_inputs("question", "plan")


def verify_trace(entry: Mapping[str, Any], rng: random.Random) -> dspy.Example:
    """Show the verifier a sum that follows its plan, or one that does not, one time in eight."""
    facts, sums = _random_facts(entry, rng)
    good = rng.random() < 0.875
    example = dspy.Example(
        question=last_line(entry["question"]),
        plan=write_plan(facts),
        expression=write_sum(sums) if good else _spoil(sums, rng),
        ok="yes" if good else "no",
    )
    return example.with_inputs("question", "plan", "expression")


def write_plan(facts: Mapping[str, int]) -> str:
    """Write a plan: ``"spider 8, horse 4"``."""
    return ", ".join(f"{animal} {number}" for animal, number in facts.items())


def write_sum(sums: list[tuple[int, int]]) -> str:
    """Write the sum of (count, legs) pairs: ``"3 * 8 + 2 * 4"``."""
    return " + ".join(f"{count} * {number}" for count, number in sums)


def _random_facts(entry: Mapping[str, Any], rng: random.Random) -> tuple[dict[str, int], list[tuple[int, int]]]:
    """Give a question's animals random legs; return those facts and the sum's terms."""
    numbers = sorted(set(legs().values()))
    facts = {animal: rng.choice(numbers) for animal in _animals(entry)}
    return facts, [(count, facts[animal]) for animal, count in _animals(entry).items()]


def _spoil(sums: list[tuple[int, int]], rng: random.Random) -> str:
    """Write a sum with one number changed."""
    at = rng.randrange(len(sums))
    count, number = sums[at]
    if rng.random() < 0.5:
        count = rng.choice([other for other in range(1, 16) if other != count])
    else:
        number = rng.choice([other for other in sorted(set(legs().values())) if other != number])
    return write_sum([*sums[:at], (count, number), *sums[at + 1 :]])


def _animals(entry: Mapping[str, Any]) -> dict[str, int]:
    found: dict[str, int] = entry["metadata"]["animals"]
    return found


def _example(entry: Mapping[str, Any]) -> dspy.Example:
    return dspy.Example(question=entry["question"], answer=entry["answer"]).with_inputs("question")


def _questions(seed: int, animals: tuple[int, int]) -> Iterator[Mapping[str, Any]]:
    """Yield reasoning-gym's questions, none with the animals and numbers of an earlier one."""
    low, high = animals
    data = data_set("leg_counting", seed, min_animals=low, max_animals=high)
    seen: set[frozenset[tuple[str, int]]] = set()
    for index in range(STRIDE):
        entry = data[index]
        key = frozenset(_animals(entry).items())
        if key not in seen:
            seen.add(key)
            yield entry


def _take(questions: Iterator[Mapping[str, Any]], size: int, known: frozenset[str]) -> list[Mapping[str, Any]]:
    """Take the next questions that name only known animals."""
    chosen: list[Mapping[str, Any]] = []
    while len(chosen) < size:
        entry = next(questions)
        if known.issuperset(_animals(entry)):
            chosen.append(entry)
    return chosen
