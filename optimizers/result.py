"""What a compile achieved."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from modpo.report import gain_interval
from modpo.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a compile achieved; scores are mean scores of the held-out examples, answered greedily.

    Attributes:
        run: the run folder.
        before: score of the student as given.
        warm: score after the warm start (as `before` where there was none).
        after: score of the compiled program.
        measures: means of what else the metric measured, ``{"before": {...}, "warm": {...}, "after": {...}}``.
        ci95_gain: paired bootstrap interval of after - warm.
        seconds: wall time of the run; of sittings that were killed, nothing.
        steps: RL steps done.
        versions: adapter versions of the compiled program.
    """

    run: Path
    before: float | None
    warm: float | None
    after: float | None
    measures: Mapping[str, Mapping[str, float]]
    ci95_gain: tuple[float, float] | None
    seconds: float
    steps: int
    versions: Mapping[str, int]


def result_of(store: Store, versions: Mapping[str, int], seconds: float) -> RunResult:
    """Read a run's result from its store."""
    made = {v.label: v for v in store.validations() if v.label != "step"}
    before, warm, after = (made.get(label) for label in ("before", "warm", "after"))
    gain = None
    if warm is not None and after is not None and len(warm.scores) == len(after.scores):
        gain = gain_interval(warm.scores, after.scores)
    last = store.last_done_step("train")
    return RunResult(
        run=store.folder,
        before=None if before is None else before.mean,
        warm=None if warm is None else warm.mean,
        after=None if after is None else after.mean,
        measures={label: dict(one.measures) for label, one in made.items()},
        ci95_gain=gain,
        seconds=seconds,
        steps=0 if last is None else last + 1,
        versions=dict(versions),
    )
