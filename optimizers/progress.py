"""How a run goes, for people: a live line on a terminal, a plain line now and then elsewhere; always on stderr."""

import sys
import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from modpo.estimate import Estimate

PLAIN_EVERY_S = 20.0
TRUSTED_UNITS = 16  # rollouts end in batches: the first of one says nothing about the rate


class ProgressWatch:
    """Shows reward, parse failures, spread-less groups, speed and time left.

    Args:
        estimate: forecasts the rest; told of every unit.
        sampler: its `sampled_tokens` are read when the speed is shown.
        about: said first.
        quiet: show nothing.
        limit_s: seconds from now by which the run ends of itself.
    """

    def __init__(
        self,
        estimate: Estimate,
        sampler: object = None,
        *,
        about: str = "",
        quiet: bool = False,
        limit_s: float | None = None,
    ) -> None:
        self.estimate = estimate
        self._sampler = sampler
        self._quiet = quiet
        self._about = about
        self._limit_s = limit_s
        self._numbers: dict[str, float] = {}
        self._start = self._said = time.monotonic()
        self._tokens = self._count()
        self._console = Console(file=sys.stderr)
        self._live = self._console.is_terminal and not quiet
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rest]}"),
            console=self._console,
            disable=not self._live,
            transient=False,
        )
        self._lock = threading.Lock()  # sampling may run ahead in a thread of its own
        self._task: TaskID = self._bar.add_task("starting", total=self._total(), rest="")

    def __enter__(self) -> Self:
        if self._about and not self._quiet:
            self._console.print(self._about, soft_wrap=True, highlight=False)
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def advance(self, phase: str, units: int = 1) -> None:
        """See `Watch.advance`."""
        with self._lock:
            self.estimate.advance(phase, units)
            self._bar.update(self._task, advance=units, description=phase, total=self._total(), rest=self._line())
            if time.monotonic() - self._said >= PLAIN_EVERY_S:
                self._say(phase)

    def show(self, **numbers: float) -> None:
        """See `Watch.show`."""
        with self._lock:
            self._numbers |= numbers
            self._bar.update(self._task, rest=self._line())
            self._say(f"step {numbers['step']:.0f}" if "step" in numbers else next(iter(numbers)))

    def _say(self, what: str) -> None:
        self._said = time.monotonic()
        if not self._live and not self._quiet:
            done = sum(phase.done for phase in self.estimate.phases.values())
            self._console.print(f"{done}/{self._total()} {what}: {self._line()}", soft_wrap=True, highlight=False)

    def _total(self) -> int:
        return sum(max(phase.units, phase.done) for phase in self.estimate.phases.values())

    def _count(self) -> int:
        return int(getattr(self._sampler, "sampled_tokens", 0))

    def _line(self) -> str:
        rate = (self._count() - self._tokens) / max(time.monotonic() - self._start, 1e-9)
        parts = [f"{name.replace('_', ' ')} {value:.2f}" for name, value in self._numbers.items() if name != "step"]
        done = sum(phase.done for phase in self.estimate.phases.values())
        left = self.estimate.seconds_left if done >= TRUSTED_UNITS else None
        if left is not None and self._limit_s is not None:
            left = min(left, max(self._limit_s - (time.monotonic() - self._start), 0.0))
        rest = "time left unknown yet" if left is None else f"about {clock(left)} left"
        return ", ".join([*parts, f"{rate:.0f} tokens/s", rest])


def clock(seconds: float) -> str:
    """Write a span of time for people: ``"3 min"``, ``"1 h 20 min"``."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{max(round(seconds), 1)} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
