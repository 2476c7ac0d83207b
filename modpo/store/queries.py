"""Queries of the store that answer a question about a whole run, or forget a part of it."""

import json
from collections.abc import Iterable
from typing import Any

from sqlalchemy import ColumnElement, and_, case, func, or_, select
from sqlmodel import Session, col, delete

from modpo.store.tables import AdapterRow, CallRow, RolloutRow, StepRow, Table, ValidationRow
from modpo.store.values import ModuleStats, Phase

OF_STEP: tuple[Any, ...] = (CallRow, RolloutRow, AdapterRow, StepRow)
"""Tables whose rows belong to one step."""


def at_step(table: Any, run: str, phase: Phase, step: int) -> ColumnElement[bool]:
    """The rows of one step."""
    return and_(table.run == run, table.phase == phase, table.step == step)


def _later(table: Any, phase: Phase, step: int) -> ColumnElement[bool]:
    """The rows of later steps: all of RL comes after all of the warm start."""
    same: ColumnElement[bool] = and_(table.phase == phase, table.step > step)
    return same if phase == "train" else or_(same, table.phase == "train")


def forget_after(session: Session, run: str, phase: Phase, step: int) -> None:
    """Delete the rows of all steps after one, and the validations that followed them."""
    for table in OF_STEP:
        session.exec(delete(table).where(table.run == run, _later(table, phase, step)))
    label, at = col(ValidationRow.label), col(ValidationRow.step)
    stale = or_(label == "after", and_(label == "step", at > step))
    if phase == "warm":
        stale = label.in_(["warm", "step", "after"])
    session.exec(delete(ValidationRow).where(col(ValidationRow.run) == run, stale))


def forget_step(session: Session, run: str, phase: Phase, step: int) -> None:
    """Delete the rows of one step."""
    for table in OF_STEP:
        session.exec(delete(table).where(at_step(table, run, phase, step)))


def insert_all(session: Session, table: type[Table], values: list[dict[str, Any]]) -> None:
    """Insert many rows at once."""
    if values:
        session.execute(Table.metadata.tables[str(table.__tablename__)].insert(), values)


def module_table(session: Session, run: str) -> list[ModuleStats]:
    """One line per module of a run, by path."""
    mine = (col(CallRow.run) == run, col(RolloutRow.run) == run)
    same = and_(
        col(CallRow.phase) == col(RolloutRow.phase),
        col(CallRow.step) == col(RolloutRow.step),
        col(CallRow.rollout) == col(RolloutRow.rollout),
    )
    query = (
        select(
            col(CallRow.module),
            func.max(CallRow.adapter),
            func.count(),
            func.avg(RolloutRow.reward),
            func.sum(case((col(CallRow.parsed).is_(False), 1), else_=0)),
            func.sum(CallRow.input_tokens),
            func.sum(CallRow.output_tokens),
        )
        .join(RolloutRow, same)
        .where(*mine)
        .group_by(col(CallRow.module))
        .order_by(col(CallRow.module))
    )
    groups = _count_groups(session.execute(select(col(StepRow.groups)).where(col(StepRow.run) == run)).scalars())
    lines = []
    for module, adapter, calls, reward, failures, taken, made in session.execute(query):
        total, silent = groups.get(module, (0, 0))
        lines.append(
            ModuleStats(
                module=module,
                adapter=adapter,
                calls=calls,
                reward=float(reward),
                parse_failures=int(failures),
                groups=total,
                silent=silent,
                input_tokens=int(taken),
                output_tokens=int(made),
            )
        )
    return lines


def _count_groups(texts: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Add up the groups of all steps, per module."""
    total: dict[str, tuple[int, int]] = {}
    for text in texts:
        for module, (count, silent) in json.loads(text).items():
            before = total.get(module, (0, 0))
            total[module] = (before[0] + count, before[1] + silent)
    return total


def failure_counts(session: Session, run: str) -> dict[str, int]:
    """Rollouts per kind of failure, ``none`` for those that were scored."""
    query = (
        select(col(RolloutRow.failure), func.count())
        .where(col(RolloutRow.run) == run)
        .group_by(col(RolloutRow.failure))
    )
    return {kind or "none": count for kind, count in session.execute(query)}
