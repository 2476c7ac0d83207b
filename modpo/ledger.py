"""Tokens, money and time of a run, with hard stops that are checked before a call is made."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Hard limits of a run; None is no limit. `seconds` is wall time, earlier sittings included."""

    dollars: float | None = None
    tokens: int | None = None
    seconds: float | None = None


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
        self._lock = threading.Lock()

    @property
    def elapsed(self) -> float:
        """Wall seconds of the run so far."""
        return self._clock() - self._start

    def add(self, call: Call) -> None:
        """Count a call that was made."""
        with self._lock:
            old = self._usage.get(call.model, Usage(model=call.model))
            self._usage[call.model] = replace(
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
        """Refuse a call that would pass the budget; calls already under way are not counted.

        Args:
            tokens: most tokens the call can use, prompt and completion.
            dollars: most it can cost.

        Raises:
            BudgetError: a limit is reached, or the call could pass it.
        """
        totals = self.totals()
        spent = {
            "dollars": (sum(usage.dollars for usage in totals), dollars, self.budget.dollars),
            "tokens": (sum(usage.input_tokens + usage.output_tokens for usage in totals), tokens, self.budget.tokens),
            "seconds": (self.elapsed, 0.0, self.budget.seconds),
        }
        for unit, (used, more, limit) in spent.items():
            if limit is not None and (used >= limit or used + more > limit):
                raise BudgetError(
                    f"the budget of {limit:g} {unit} is spent: {used:g} used and up to {more:g} needed for the next"
                    f" call; raise the limit and resume the run"
                )
