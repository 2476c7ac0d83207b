"""Frozen modules: any LM that is no policy. In a rollout each of its calls is held within the run's budget."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import dspy

from modpo.errors import BudgetError
from modpo.ledger import Ledger
from modpo.lm.pricing import price
from modpo.lm.recorder import current_recorder, reports_calls

_LEDGER = "_modpo_ledger"


def guarded(lm: Any, ledger: Ledger) -> Any:
    """A copy of a frozen LM that asks the ledger before each call; history and connections stay shared.

    The check sits before DSPy's own machinery: what callbacks raise, DSPy swallows.
    """
    kept = copy.copy(lm)
    kind = type(lm)
    kept.__class__ = type(kind.__name__, (_Guard, kind), {"__module__": kind.__module__})
    kept.__dict__[_LEDGER] = ledger
    return kept


class _Guard:
    """Placed before the class of an LM."""

    def __call__(self, prompt: Any = None, *, messages: Any = None, **options: Any) -> Any:
        with _within_budget(self, prompt, messages, options):
            return super().__call__(prompt, messages=messages, **options)  # type: ignore[misc]

    async def acall(self, prompt: Any = None, *, messages: Any = None, **options: Any) -> Any:
        with _within_budget(self, prompt, messages, options):
            return await super().acall(prompt, messages=messages, **options)  # type: ignore[misc]


@contextmanager
def _within_budget(lm: Any, prompt: Any, messages: Any, options: dict[str, Any]) -> Iterator[None]:
    """Keep what the call can use at most; a refusal stops the run, whatever the program makes of it."""
    ledger: Ledger = lm.__dict__[_LEDGER]
    inputs = len(repr((prompt, messages)).encode())  # a token is at least one byte
    outputs = int(options.get("max_tokens") or lm.kwargs.get("max_tokens") or 0)
    dollars = None if ledger.budget.dollars is None else price(str(lm.model), inputs, outputs)
    with ExitStack() as stack:
        try:
            stack.enter_context(ledger.reserve(tokens=inputs + outputs, dollars=dollars or 0.0))
        except BudgetError as error:
            recorder = current_recorder()
            if recorder is not None:
                recorder.fail(error)
            raise
        yield


def is_frozen(lm: Any) -> bool:
    """Whether an LM is one that is not trained."""
    return isinstance(lm, dspy.BaseLM) and not reports_calls(lm)
