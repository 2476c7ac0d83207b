"""Between frozen values and rows: the only place that knows both."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from modpo.records import Call, Failure, Finish, Group, Rollout
from modpo.store.tables import AdapterRow, CallRow, RolloutRow, RunRow, StepRow, ValidationRow
from modpo.store.values import AdapterFile, Label, Phase, RunInfo, Status, StepRecord, StepSummary, Validation

Row = dict[str, Any]

_CALL_FIELDS = tuple(Call.__dataclass_fields__)
_ROLLOUT_FIELDS = tuple(name for name in Rollout.__dataclass_fields__ if name not in ("step", "calls"))


def run_row(run: str, info: RunInfo) -> RunRow:
    """Row of a run."""
    return RunRow(
        id=run,
        layout=info.layout,
        modpo_version=info.modpo_version,
        created=info.created or time.time(),
        name=info.name,
        target=info.target,
        optimizer=info.optimizer,
        settings=json.dumps(dict(info.settings)),
        program=json.dumps(info.program),
        status=info.status,
        message=info.message,
        estimates=json.dumps(dict(info.estimates)),
    )


def run_info(row: RunRow, *, alive: bool) -> RunInfo:
    """A run from its row; one that says it is running while nobody works on it was interrupted."""
    status = "interrupted" if row.status == "running" and not alive else row.status
    return RunInfo(
        name=row.name,
        optimizer=row.optimizer,
        settings=json.loads(row.settings),
        target=row.target,
        program=json.loads(row.program),
        status=cast(Status, status),
        message=row.message,
        estimates=json.loads(row.estimates),
        created=row.created,
        modpo_version=row.modpo_version,
        layout=row.layout,
    )


def step_row(run: str, record: StepRecord, *, done: bool) -> Row:
    """Row of a step."""
    rewards = [rollout.reward for rollout in record.rollouts]
    return {
        "run": run,
        "phase": record.phase,
        "step": record.step,
        "done": done,
        "created": time.time(),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "metrics": json.dumps(dict(record.metrics)),
        "groups": json.dumps(_count_groups(record.groups, record.rollouts)),
    }


def _count_groups(groups: Iterable[Group], rollouts: Sequence[Rollout]) -> dict[str, tuple[int, int]]:
    """Per module: groups with one of its calls, and those of them without spread."""
    counts: dict[str, tuple[int, int]] = {}
    for group in groups:
        for module in sorted({rollouts[member.rollout].calls[member.call].module for member in group.members}):
            total, silent = counts.get(module, (0, 0))
            counts[module] = (total + 1, silent + group.silent)
    return counts


def step_summary(row: StepRow) -> StepSummary:
    """A step from its row."""
    return StepSummary(
        step=row.step,
        phase=cast(Phase, row.phase),
        done=row.done,
        reward=row.reward,
        metrics=json.loads(row.metrics),
        created=row.created,
    )


def rollout_rows(run: str, record: StepRecord) -> tuple[list[Row], list[Row]]:
    """Rows of the rollouts of a step and of their calls."""
    rollouts: list[Row] = []
    calls: list[Row] = []
    for index, rollout in enumerate(record.rollouts):
        key = {"run": run, "phase": record.phase, "step": record.step, "rollout": index}
        rollouts.append({**key, "own_step": rollout.step, **{name: getattr(rollout, name) for name in _ROLLOUT_FIELDS}})
        for number, call in enumerate(rollout.calls):
            credit = {"reward": rollout.reward, "advantage": record.advantages.get((index, number))}
            calls.append({**key, "call": number, **{name: getattr(call, name) for name in _CALL_FIELDS}, **credit})
    return rollouts, calls


def rollouts_from(rollouts: Iterable[RolloutRow], calls: Iterable[CallRow]) -> list[Rollout]:
    """Rollouts from rows that come in the order of their indices."""
    by_rollout: dict[int, list[Call]] = {}
    for row in calls:
        values = {name: getattr(row, name) for name in _CALL_FIELDS}
        by_rollout.setdefault(row.rollout, []).append(Call(**{**values, "finish": cast(Finish, row.finish)}))
    return [
        Rollout(
            step=row.own_step,
            calls=tuple(by_rollout.get(row.rollout, ())),
            **{
                **{name: getattr(row, name) for name in _ROLLOUT_FIELDS},
                "failure": cast(Failure | None, row.failure),
            },
        )
        for row in rollouts
    ]


def adapter_rows(run: str, folder: Path, record: StepRecord) -> list[Row]:
    """Rows of the adapters after a step; folders inside the run folder are kept relative, so that it may be moved."""
    root = folder.resolve()
    rows = []
    for name, version, path, sha256 in record.adapters:
        where = Path(path).resolve()
        inside = where.relative_to(root) if where.is_relative_to(root) else where
        key = {"run": run, "phase": record.phase, "step": record.step, "name": name}
        rows.append({**key, "version": version, "folder": inside.as_posix(), "sha256": sha256})
    return rows


def adapter_file(row: AdapterRow, folder: Path) -> AdapterFile:
    """A saved adapter from its row."""
    return AdapterFile(row.name, row.version, folder / row.folder, row.sha256)


def validation_row(run: str, validation: Validation) -> ValidationRow:
    """Row of a validation."""
    return ValidationRow(
        run=run,
        label=validation.label,
        step=validation.step,
        mean=validation.mean,
        n=len(validation.scores),
        scores=validation.scores,
        measures=dict(validation.measures),
        adapters=json.dumps(dict(validation.adapters)),
        seconds=validation.seconds,
    )


def validation_from(row: ValidationRow) -> Validation:
    """A validation from its row."""
    versions: Mapping[str, int] = json.loads(row.adapters)
    return Validation(
        label=cast(Label, row.label),
        step=row.step,
        scores=row.scores,
        measures=row.measures,
        adapters=versions,
        seconds=row.seconds,
    )
