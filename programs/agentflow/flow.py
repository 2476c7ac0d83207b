"""AgentFlow's loop: plan, execute, verify, until the memory holds the answer; then generate it.

Source: AgentFlow, arXiv 2510.05592 [C]. Departures: the question is not analysed once before the first turn, the last
turn allowed is not verified (its verdict could change nothing), and tools are typed, with commands that are read and
never run as code.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, final

import dspy
from dspy.utils.exceptions import AdapterParseError

from modpo.errors import TaskError
from modpo.programs.agentflow.memory import Entry, Memory
from modpo.programs.agentflow.roles import complete
from modpo.programs.tools.tool import Tool, as_tool


class _SpentError(Exception):
    """A budget of this question is spent; the argument says which."""


@final
class AgentFlow(dspy.Module):
    """Answers a question in turns. Its predictors are `planner`, `executor`, `verifier` and `generator`.

    In each turn the planner chooses a tool, the executor writes its command, the tool runs, and the verifier says
    whether to stop. What cannot be read (a plan, a command), a tool that does not exist and one that fails cost the
    turn and are said in the memory, for the planner to see. All state is of one call: an instance may answer many
    questions at the same time.

    Args:
        tools: functions, `dspy.Tool`s or tools of `modpo.programs.tools`; they must be thread-safe.
        max_turns: most turns.
        max_seconds: a question's time; None for no limit. Looked at before each call of a module and each tool; a
            tool gets what is left.
        max_tokens: prompt and completion tokens of a question, as far as the LMs report them; looked at likewise.
            When either is spent the generator answers from what there is.
        tool_timeout_s: most seconds of one tool call.
        memory_tokens: of the memory, as the planner's tokenizer counts.
        result_tokens: of one command, result or sub-goal in it.
        roles: signatures in place of `Plan`, `Execute`, `Verify` and `Generate`, by predictor.
        predictor: makes a predictor of a signature.

    Raises:
        TaskError: no tools, two of one name, or a signature that does not fit its role.
    """

    def __init__(
        self,
        tools: Sequence[Any],
        max_turns: int = 3,
        *,
        max_seconds: float | None = None,
        max_tokens: int | None = None,
        tool_timeout_s: float = 30.0,
        memory_tokens: int = 2048,
        result_tokens: int = 512,
        roles: Mapping[str, type[dspy.Signature]] | None = None,
        predictor: Callable[[type[dspy.Signature]], dspy.Module] = dspy.Predict,
    ) -> None:
        super().__init__()
        if max_turns < 1 or not 1 <= result_tokens <= memory_tokens:
            raise TaskError(
                f"max_turns={max_turns}, memory_tokens={memory_tokens}, result_tokens={result_tokens}: all must be at "
                "least 1, and a result must fit into the memory"
            )
        self.tools = _by_name(tools)
        self.max_turns = max_turns
        self.max_seconds = max_seconds
        self.max_tokens = max_tokens
        self.tool_timeout_s = tool_timeout_s
        self.memory_tokens = memory_tokens
        self.result_tokens = result_tokens
        self.catalogue = "\n".join(tool.describe() for tool in self.tools.values())
        signatures = complete(roles or {})
        self.planner = predictor(signatures["planner"])
        self.executor = predictor(signatures["executor"])
        self.verifier = predictor(signatures["verifier"])
        self.generator = predictor(signatures["generator"])

    def forward(self, question: str) -> dspy.Prediction:
        """Answer a question.

        Returns:
            The generator's outputs, and `turns` (a dict per turn, see `Entry`), `memory` (as the generator saw it),
            `stopped` ("verifier", "turns", "time" or "tokens"), `condensed` and `left_out` (entries of the memory).
        """
        memory = Memory(_counter(self.planner), self.memory_tokens, self.result_tokens)
        with _Budget(self.max_seconds, self.max_tokens).running() as budget:
            try:
                stopped = self._turns(question, memory, budget)
            except _SpentError as spent:
                stopped = str(spent)
        seen = memory.render()
        answer = _ask(self.generator, question=question, memory=seen)
        return dspy.Prediction(
            **answer.toDict(),
            turns=memory.record(),
            memory=seen,
            stopped=stopped,
            condensed=memory.condensed,
            left_out=memory.left_out,
        )

    def _turns(self, question: str, memory: Memory, budget: "_Budget") -> str:
        """Take turns; returns why there is no further one."""
        for turn in range(1, self.max_turns + 1):
            memory.add(self._act(turn, question, memory, budget))
            if turn < self.max_turns and self._satisfied(question, memory, budget):
                return "verifier"
        return "turns"

    def _act(self, turn: int, question: str, memory: Memory, budget: "_Budget") -> Entry:
        """Plan and execute one step; whatever goes wrong in it is its result."""
        budget.check()
        try:
            plan = _ask(self.planner, question=question, tools=self.catalogue, memory=memory.render())
        except AdapterParseError:
            return Entry(turn=turn, result="the plan could not be read", error=True)
        name, goal = str(plan.tool).strip(), str(plan.get("sub_goal") or "")
        entry = partial(Entry, turn=turn, tool=name, sub_goal=goal)
        tool = self.tools.get(name) or self.tools.get(name.lower())
        if tool is None:
            return entry(result=f"no such tool; there are {', '.join(self.tools)}", error=True)
        given = {"sub_goal": goal, "context": str(plan.get("context") or ""), "tool": tool.describe()}
        command = ""
        try:
            budget.check()
            command = str(_ask(self.executor, question=question, memory=memory.render(), **given).command)
            budget.check()
        except AdapterParseError:
            return entry(result="the command could not be read", error=True)
        except _SpentError as spent:  # a turn that was planned is a turn: metrics score as many as there are plans
            memory.add(entry(command=command, result=f"no {spent} left", error=True))
            raise
        done = tool.run(command, budget.at_most(self.tool_timeout_s))
        return entry(command=command, result=done.text, error=done.error)

    def _satisfied(self, question: str, memory: Memory, budget: "_Budget") -> bool:
        """Whether the verifier says to stop; a verdict that cannot be read is noted, and does not stop."""
        budget.check()
        try:
            verdict = _ask(self.verifier, question=question, tools=self.catalogue, memory=memory.render()).verdict
        except AdapterParseError:
            memory.note("the verdict could not be read")
            return False
        word = str(verdict).strip().lower().rstrip(".")
        if word not in ("stop", "continue"):
            memory.note("the verdict was neither stop nor continue")
        return word == "stop"


@final
class _Budget:
    """Time and tokens of one question."""

    def __init__(self, max_seconds: float | None, max_tokens: int | None) -> None:
        self._deadline = None if max_seconds is None else time.monotonic() + max_seconds
        self._max_tokens = max_tokens
        self._tracker: Any = None

    @contextmanager
    def running(self) -> Iterator["_Budget"]:
        """Count the tokens of what runs inside; whoever counts outside counts them too."""
        with nullcontext() if self._max_tokens is None else dspy.track_usage() as self._tracker:
            yield self

    def check(self) -> None:
        """Raise `_SpentError` if nothing is left."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise _SpentError("time")
        if self._max_tokens is not None and self._used() >= self._max_tokens:
            raise _SpentError("tokens")

    def at_most(self, seconds: float) -> float:
        """The seconds that a tool may take."""
        return seconds if self._deadline is None else max(min(seconds, self._deadline - time.monotonic()), 0.0)

    def _used(self) -> int:
        totals = self._tracker.get_total_tokens().values()
        return sum(one.get("prompt_tokens") or 0 for one in totals) + sum(
            one.get("completion_tokens") or 0 for one in totals
        )


def _ask(module: dspy.Module, **known: str) -> dspy.Prediction:
    """Call a predictor with those of the known inputs that its signature has."""
    predictor = next(iter(module.predictors()))
    return module(**{name: known[name] for name in predictor.signature.input_fields if name in known})


def _by_name(tools: Sequence[Any]) -> dict[str, Tool]:
    if isinstance(tools, str | bytes) or not isinstance(tools, Iterable):
        raise TaskError(f"tools are {type(tools).__name__}; give a list of functions or tools")
    found: dict[str, Tool] = {}
    for tool in map(as_tool, tools):
        if tool.name in found:
            raise TaskError(f"two tools are called {tool.name!r}; give one of them another name")
        found[tool.name] = tool
    if not found:
        raise TaskError("AgentFlow needs at least one tool")
    return found


def _counter(planner: dspy.Module) -> Callable[[str], int]:
    """How the planner's LM counts tokens; as litellm does where the LM cannot tell."""
    lm = next(iter(planner.predictors())).lm or dspy.settings.lm
    own = getattr(lm, "count_tokens", None)
    if own is not None:
        return own  # type: ignore[no-any-return]
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its own copy: no request for a newer one
    from litellm import token_counter

    return lambda text: token_counter(model=str(getattr(lm, "model", "")), text=text)
