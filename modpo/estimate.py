"""How long the rest of a run will take: measured rates of its phases, and ratios for phases not yet begun."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

TRUSTED = 0.05  # share of a phase that must be done before its own rate stands alone: work comes in bursts


@dataclass(slots=True)
class Phase:
    """Work of one kind.

    Attributes:
        name: for people.
        units: how many units there are in all.
        cost: what a unit is expected to cost, relative to the other phases' units; used until enough of
            this phase is measured.
        done: units done.
        seconds: time spent on them.
    """

    name: str
    units: int
    cost: float
    done: int = 0
    seconds: float = 0.0

    def rate(self, unit: float) -> float:
        """Seconds per unit: measured, filled up to the trusted share with a guess of `unit` seconds per cost."""
        guessed = max(TRUSTED * self.units - self.done, 0.0)
        return (self.seconds + guessed * unit * self.cost) / (self.done + guessed)


@dataclass(slots=True)
class Estimate:
    """Time left of a run made of phases that follow each other and may take turns."""

    phases: dict[str, Phase]
    clock: Callable[[], float] = time.monotonic
    _since: float = field(init=False)

    def __post_init__(self) -> None:
        self._since = self.clock()

    def advance(self, name: str, units: int = 1) -> None:
        """Note units of a phase as done; the time since the last note is theirs."""
        now = self.clock()
        phase = self.phases[name]
        phase.done += units
        phase.seconds += now - self._since
        self._since = now

    @property
    def seconds_left(self) -> float | None:
        """Expected rest in seconds; None before anything was measured."""
        measured = [phase for phase in self.phases.values() if phase.done]
        expected = sum(phase.done * phase.cost for phase in measured)
        if not expected:
            return None
        unit = sum(phase.seconds for phase in measured) / expected
        unfinished = [phase for phase in self.phases.values() if phase.done < phase.units]
        return sum(((phase.units - phase.done) * phase.rate(unit) for phase in unfinished), start=0.0)
