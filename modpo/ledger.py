"""Tokens, money and time of a run, with hard stops that are checked before a call is made."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from modpo.config import Budget
from modpo.errors import BudgetError
from modpo.records import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one model has used.

    Attributes:
        model: its name.
        calls: number of calls.
        input_tokens: prompt tokens.
        output_tokens: completion tokens.
        dollars: money; calls of unknown cost count as 0.
        seconds: wall time of the calls, summed over calls that ran side by side.
    """

    model: str
    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    dollars: float = 0.0
    seconds: float = 0.0


class Ledger:
    """Thread-safe counters per model.

    Args:
        budget: the limits.
        used: what earlier sittings of the run used.
        elapsed: wall seconds that earlier sittings took.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        budget: Budget | None = None,
        *,
        used: Iterable[Usage] = (),
        elapsed: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget = budget or Budget()
        self._usage = {usage.model: usage for usage in used}
        self._clock = clock
        self._start = clock() - elapsed
        self._reserved = {"dollars": 0.0, "tokens": 0.0}
        self._lock = threading.Lock()

    @property
    def elapsed(self) -> float:
        """Wall seconds of the run so far."""
        return self._clock() - self._start

    def add(self, call: Call) -> None:
        """Count a call that was made; a policy's calls are counted per adapter, whatever its version."""
        name = call.model.partition("@")[0] if call.prompt_ids else call.model
        with self._lock:
            old = self._usage.get(name, Usage(model=name))
            self._usage[name] = replace(
                old,
                calls=old.calls + 1,
                input_tokens=old.input_tokens + call.input_tokens,
                output_tokens=old.output_tokens + call.output_tokens,
                dollars=old.dollars + (call.dollars or 0.0),
                seconds=old.seconds + call.seconds,
            )

    def totals(self) -> list[Usage]:
        """What each model has used, by name."""
        with self._lock:
            return [self._usage[name] for name in sorted(self._usage)]

    def check(self, *, tokens: int = 0, dollars: float = 0.0) -> None:
        """Refuse a call that would pass the budget together with those under way.

        Args:
            tokens: most tokens the call can use, prompt and completion.
            dollars: most it can cost.

        Raises:
            BudgetError: a limit is reached, or the call could pass it.
        """
        with self._lock:
            self._check(tokens, dollars)

    @contextmanager
    def reserve(self, *, tokens: int = 0, dollars: float = 0.0) -> Iterator[None]:
        """`check` a call and keep its share of the budget for it while it is under way."""
        with self._lock:
            self._check(tokens, dollars)
            self._reserved["tokens"] += tokens
            self._reserved["dollars"] += dollars
        try:
            yield
        finally:
            with self._lock:
                self._reserved["tokens"] -= tokens
                self._reserved["dollars"] -= dollars

    def _check(self, tokens: int, dollars: float) -> None:
        usage = self._usage.values()
        spent = {
            "dollars": (sum(each.dollars for each in usage), dollars, self.budget.dollars),
            "tokens": (sum(each.input_tokens + each.output_tokens for each in usage), tokens, self.budget.tokens),
            "seconds": (self.elapsed, 0.0, self.budget.seconds),
        }
        for unit, (used, more, limit) in spent.items():
            held = self._reserved.get(unit, 0.0)
            if limit is not None and (used >= limit or used + held + more > limit):
                under_way = f", {held:g} held for calls under way" if held else ""
                raise BudgetError(
                    f"the budget of {limit:g} {unit} is spent: {used:g} used{under_way} and up to {more:g} needed for"
                    f" the next call; raise the limit and resume the run"
                )
