"""Counting legs: planner -> executor (with a calculator) -> verifier, on reasoning-gym's questions."""

import dspy

from modpo.programs.tools import calculator
from modpo.programs.xml import XMLPredict


class Plan(dspy.Signature):
    """List each animal with its legs."""

    question: str = dspy.InputField()
    plan: str = dspy.OutputField()


class Execute(dspy.Signature):
    """Write the sum."""

    question: str = dspy.InputField()
    plan: str = dspy.InputField()
    expression: str = dspy.OutputField()


class Verify(dspy.Signature):
    """Does the sum follow the plan?"""

    question: str = dspy.InputField()
    plan: str = dspy.InputField()
    expression: str = dspy.InputField()
    ok: str = dspy.OutputField()


class Legs(dspy.Module):
    """Answer how many legs some animals have together.

    The planner says what each animal has ("spider 8, horse 4"), the executor writes the sum
    ("3 * 8 + 2 * 4"), the verifier accepts ("yes") or rejects ("no") it. A rejected executor tries
    once more and is told what was rejected. The calculator gives the answer; what it cannot evaluate
    ends the run with its `ValueError`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.planner = XMLPredict(Plan)
        self.executor = XMLPredict(Execute)
        self.verifier = XMLPredict(Verify)

    def forward(self, question: str) -> dspy.Prediction:
        """Answer a question of reasoning-gym's leg_counting; `answer` is a number as text."""
        asked = last_line(question)
        plan = self.planner(question=asked).plan
        expression = self.executor(question=asked, plan=plan).expression
        if self.verifier(question=asked, plan=plan, expression=expression).ok.strip().lower() == "no":
            expression = self.executor(question=asked, plan=rejected(plan, expression)).expression
        return dspy.Prediction(plan=plan, expression=expression, answer=calculator(expression))


def last_line(question: str) -> str:
    """Keep the question itself; the line before it says the same in every question."""
    return question.strip().splitlines()[-1]


def rejected(plan: str, expression: str) -> str:
    """Tell the executor, within its plan, what the verifier rejected."""
    return f"{plan} (not {expression})"
