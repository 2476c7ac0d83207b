"""What goes into the store and comes out of it: frozen values, no database rows."""

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from modpo.records import Group, Rollout

LAYOUT = 2
"""Version of the store's layout; a run written with another one is refused."""

Phase = Literal["warm", "train"]
Status = Literal["running", "done", "stopped", "failed", "interrupted"]
Label = Literal["before", "warm", "step", "after"]


def _modpo_version() -> str:
    """Version of the installed modpo."""
    try:
        return importlib.metadata.version("modpo")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


class AdapterFile(NamedTuple):
    """One saved version of an adapter: its name, version, folder and `hash_folder` of that folder."""

    name: str
    version: int
    folder: Path
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a run was asked to do and how it stands.

    Attributes:
        name: name of the task.
        optimizer: name of the optimizer.
        settings: its settings, JSON-able.
        target: what the command line was given; None for a run started from Python.
        program: state of the student program, JSON-able; None when there is none to keep.
        status: how the run stands; ``interrupted`` is never saved: it is what a running run is
            called when no process holds its lock.
        message: why it stopped or failed.
        estimates: forecasts such as ``seconds_left``, JSON-able.
        created: start in seconds since 1970; 0 lets the store fill in the present.
        modpo_version: version of modpo that wrote it.
        layout: version of the store's layout.
    """

    name: str
    optimizer: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    target: str | None = None
    program: Mapping[str, Any] | None = None
    status: Status = "running"
    message: str = ""
    estimates: Mapping[str, Any] = field(default_factory=dict)
    created: float = 0.0
    modpo_version: str = field(default_factory=_modpo_version)
    layout: int = LAYOUT


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """All that one finished step leaves behind; saved in one transaction.

    Attributes:
        step: number of the step within its phase, from 0.
        phase: ``warm`` for the warm start, ``train`` for RL.
        rollouts: the step's rollouts.
        advantages: advantage of each credited call, keyed (index of the rollout, index of the call).
        groups: the groups the advantages came from, for the counts per module.
        metrics: numbers of the step, JSON-able.
        adapters: the version every adapter has after this step.
    """

    step: int
    phase: Phase = "train"
    rollouts: Sequence[Rollout] = ()
    advantages: Mapping[tuple[int, int], float] = field(default_factory=dict)
    groups: Sequence[Group] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    adapters: Sequence[AdapterFile] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """A step without its rollouts; `reward` is their mean, None when there are none."""

    step: int
    phase: Phase
    done: bool
    reward: float | None
    metrics: Mapping[str, Any]
    created: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Scores of one validation.

    Attributes:
        label: ``before`` any training, after the ``warm`` start, after a ``step``, or ``after`` all.
        step: the train step it followed; -1 before the first.
        scores: one score per example, in data order.
        measures: means of the further numbers that the metric measured, over the rollouts it scored.
        adapters: version of each adapter that answered.
        seconds: wall time.
    """

    label: Label
    step: int
    scores: tuple[float, ...]
    measures: Mapping[str, float] = field(default_factory=dict)
    adapters: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def mean(self) -> float:
        """Mean score, 0 for no examples."""
        return sum(self.scores) / len(self.scores) if self.scores else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleStats:
    """One module over a whole run.

    Attributes:
        module: its path.
        adapter: the adapter that answers for it; None when frozen.
        calls: how often it was called.
        reward: mean, over its calls, of their rollouts' rewards.
        parse_failures: calls whose completion could not be parsed.
        groups: groups with a call of this module.
        silent: those of them without spread, from which nothing could be learnt.
        input_tokens: prompt tokens.
        output_tokens: completion tokens.
    """

    module: str
    adapter: str | None
    calls: int
    reward: float
    parse_failures: int
    groups: int
    silent: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One line of the list of runs; `steps` counts finished train steps, `score` is the last validation's mean."""

    folder: Path
    info: RunInfo
    steps: int
    score: float | None
