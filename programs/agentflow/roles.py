"""The four roles as signatures; a program may bring its own, with fewer fields or other words."""

from collections.abc import Mapping

import dspy

from modpo.errors import TaskError, nearest


class Plan(dspy.Signature):
    """Choose the next step: a sub-goal, what is known that it needs, and the one tool that reaches it."""

    question: str = dspy.InputField()
    tools: str = dspy.InputField(desc="name(inputs) -> output: what it does")
    memory: str = dspy.InputField(desc="what earlier turns did")
    context: str = dspy.OutputField(desc="what the executor must know")
    sub_goal: str = dspy.OutputField()
    tool: str = dspy.OutputField(desc="the tool's name alone")


class Execute(dspy.Signature):
    """Write the command by which the tool reaches the sub-goal: a JSON object of its inputs, or its only input."""

    question: str = dspy.InputField()
    sub_goal: str = dspy.InputField()
    context: str = dspy.InputField()
    tool: str = dspy.InputField(desc="name(inputs) -> output: what it does")
    command: str = dspy.OutputField()


class Verify(dspy.Signature):
    """Does the memory hold all that the answer needs?"""

    question: str = dspy.InputField()
    memory: str = dspy.InputField()
    analysis: str = dspy.OutputField()
    verdict: str = dspy.OutputField(desc="stop if it does, else continue")


class Generate(dspy.Signature):
    """Answer the question from the memory."""

    question: str = dspy.InputField()
    memory: str = dspy.InputField()
    answer: str = dspy.OutputField()


ROLES: Mapping[str, type[dspy.Signature]] = {
    "planner": Plan,
    "executor": Execute,
    "verifier": Verify,
    "generator": Generate,
}
_GIVEN = {
    "planner": {"question", "tools", "memory"},
    "executor": {"question", "memory", "context", "sub_goal", "tool"},
    "verifier": {"question", "tools", "memory"},
    "generator": {"question", "memory"},
}
_NEEDED = {"planner": "tool", "executor": "command", "verifier": "verdict", "generator": None}


def complete(given: Mapping[str, type[dspy.Signature]]) -> dict[str, type[dspy.Signature]]:
    """The signature of each role, the given ones in place of ours.

    Raises:
        TaskError: there is no such role, or its signature asks for what it is not given or lacks what is needed of it.
    """
    for role, signature in given.items():
        if role not in ROLES:
            raise TaskError(f"AgentFlow has no role {role!r}; {nearest(role, ROLES)}")
        for name in signature.input_fields:
            if name not in _GIVEN[role]:
                raise TaskError(f"the {role} is not given {name!r}; {nearest(name, _GIVEN[role])}")
        needed = _NEEDED[role]
        if needed is not None and needed not in signature.output_fields:
            has = ", ".join(signature.output_fields)
            raise TaskError(f"the {role}'s signature needs the output {needed!r}; it has {has}")
    return {**ROLES, **given}
