"""The store of one run: every method is one transaction, so that a killed process leaves whole steps only."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

from sqlalchemy import Engine, func, inspect
from sqlmodel import Session, col, delete, select

from modpo.errors import RunVersionError, StoreError
from modpo.ledger import Usage
from modpo.lm.versions import adapter_folder
from modpo.records import Rollout
from modpo.store import database, locking, queries, rows
from modpo.store.files import hash_folder, uninterrupted
from modpo.store.tables import AdapterRow, CallRow, CostRow, RolloutRow, RunRow, StepRow, Table, ValidationRow
from modpo.store.values import (
    LAYOUT,
    AdapterFile,
    Label,
    ModuleStats,
    Phase,
    RunInfo,
    Status,
    StepRecord,
    StepSummary,
    Validation,
)


class Store:
    """One run's rows and folder; made by `Store.create` and `Store.open`, safe to use from several threads."""

    def __init__(self, folder: Path, run_id: str, engine: Engine) -> None:
        self.folder = folder
        self.run_id = run_id
        self._engine = engine

    @classmethod
    def create(cls, folder: Path, *, url: str | None = None) -> Self:
        """Make a run folder and its tables.

        Args:
            folder: a new or not yet used folder.
            url: SQLAlchemy URL of the database; None for SQLite in the folder.

        Raises:
            StoreError: the folder already holds a run, or the folder or database cannot be written.
            RunVersionError: the database holds runs of another layout.
        """
        if (folder / database.MARKER).exists():
            raise StoreError(f"{folder} already holds a run: continue it with `modpo resume`, or name a new folder")
        marker = database.new_marker(url)
        with database.describing(f"cannot make the run folder {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        engine = database.connect(database.database_url(folder, marker))
        with database.describing(f"cannot make the run's tables in {engine.url!r}"):
            _refuse_other_layouts(engine)
            Table.metadata.create_all(engine)
        # The marker comes last: a folder with one has tables.
        with database.describing(f"cannot make the run folder {folder}"):
            database.write_marker(folder, marker)
        return cls(folder, marker.run, engine)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the run in a folder.

        Raises:
            StoreError: there is no run, or its database cannot be read.
            RunVersionError: the run has another version of the layout.
        """
        marker = database.read_marker(folder)
        url = database.database_url(folder, marker)
        if url.get_backend_name() == "sqlite" and not Path(str(url.database)).exists():
            raise StoreError(f"the database of run {folder} is gone: no file {url.database}")
        store = cls(folder, marker.run, database.connect(url))
        with store._reading() as session:
            session.get(RunRow, marker.run)
        return store

    def close(self) -> None:
        """Close the connections; a later use opens them again."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        """The store itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the store."""
        self.close()

    def lock(self) -> AbstractContextManager[None]:
        """Hold the run against other processes; raises `RunLockedError` naming the one that works on it."""
        return locking.hold(self.folder)

    def save_run(self, info: RunInfo) -> None:
        """Write what the run was asked to do, or replace it."""
        with self._writing() as session:
            session.merge(rows.run_row(self.run_id, info))

    def run(self) -> RunInfo:
        """What the run was asked to do and how it stands.

        Raises:
            StoreError: the run was killed before it was described.
        """
        with self._reading() as session:
            row = session.get(RunRow, self.run_id)
        if row is None:
            raise StoreError(f"run {self.folder} was stopped before it began; delete the folder and start again")
        return rows.run_info(row, alive=row.status == "running" and locking.held(self.folder))

    def set_status(self, status: Status, message: str = "", **estimates: Any) -> None:
        """Write how the run stands, why, and forecasts such as ``seconds_left``."""
        info = self.run()
        self.save_run(replace(info, status=status, message=message, estimates={**info.estimates, **estimates}))

    def save_rollouts(self, step: int, rollouts: Sequence[Rollout], phase: Phase = "train") -> None:
        """Keep the rollouts of a step that is not trained yet, instead of what was kept of it before."""
        self._replace(StepRecord(step=step, phase=phase, rollouts=rollouts), done=False)

    def save_step(self, step: StepRecord) -> None:
        """Write a finished step, its rollouts, calls, advantages and adapters, in one transaction.

        Raises:
            StoreError: the disk is full or the database is gone; the step before is still the last one.
        """
        self._replace(step, done=True)

    def _replace(self, record: StepRecord, *, done: bool) -> None:
        rollouts, calls = rows.rollout_rows(self.run_id, record)
        with self._writing() as session:
            queries.forget_step(session, self.run_id, record.phase, record.step)
            queries.insert_all(session, StepRow, [rows.step_row(self.run_id, record, done=done)])
            queries.insert_all(session, RolloutRow, rollouts)
            queries.insert_all(session, CallRow, calls)
            queries.insert_all(session, AdapterRow, rows.adapter_rows(self.run_id, self.folder, record))

    def rollouts(self, step: int, phase: Phase = "train") -> list[Rollout] | None:
        """The kept rollouts of a step, done or not; None when nothing was kept of it."""
        with self._reading() as session:
            if session.get(StepRow, (self.run_id, phase, step)) is None:
                return None
            of_rollouts = select(RolloutRow).where(queries.at_step(RolloutRow, self.run_id, phase, step))
            of_calls = select(CallRow).where(queries.at_step(CallRow, self.run_id, phase, step))
            return rows.rollouts_from(
                session.exec(of_rollouts.order_by(col(RolloutRow.rollout))),
                session.exec(of_calls.order_by(col(CallRow.rollout), col(CallRow.call))),
            )

    def advantages(self, step: int, phase: Phase = "train") -> dict[tuple[int, int], float]:
        """Advantage of each credited call of a step, keyed (index of the rollout, index of the call)."""
        query = select(CallRow.rollout, CallRow.call, CallRow.advantage).where(
            queries.at_step(CallRow, self.run_id, phase, step), col(CallRow.advantage).is_not(None)
        )
        with self._reading() as session:
            return {(rollout, call): value for rollout, call, value in session.exec(query) if value is not None}

    def steps(self, phase: Phase | None = None) -> list[StepSummary]:
        """The known steps, warm start first, done or not."""
        query = select(StepRow).where(StepRow.run == self.run_id).order_by(col(StepRow.phase).desc(), col(StepRow.step))
        with self._reading() as session:
            return [rows.step_summary(row) for row in session.exec(query) if phase in (None, row.phase)]

    def last_done_step(self, phase: Phase = "train") -> int | None:
        """Number of the last finished step; None before the first."""
        query = select(func.max(StepRow.step)).where(
            StepRow.run == self.run_id, StepRow.phase == phase, col(StepRow.done).is_(True)
        )
        with self._reading() as session:
            return session.exec(query).one()

    def adapters(self, step: int, phase: Phase = "train") -> list[AdapterFile]:
        """The version each adapter had after a step, by name; folders are absolute or below the run folder."""
        query = select(AdapterRow).where(queries.at_step(AdapterRow, self.run_id, phase, step))
        with self._reading() as session:
            return [rows.adapter_file(row, self.folder) for row in session.exec(query.order_by(col(AdapterRow.name)))]

    def latest_adapters(self) -> list[AdapterFile]:
        """The version each adapter had after the last finished step of either phase; empty before the first."""
        done = [step for step in self.steps() if step.done]
        return self.adapters(done[-1].step, done[-1].phase) if done else []

    def adapter_folder(self, name: str, version: int) -> Path:
        """Where a version of an adapter belongs: ``adapters/<name>/v<version>`` in the run folder."""
        return adapter_folder(self.folder, name, version)

    def verify(self, adapter: AdapterFile) -> None:
        """Check that a saved adapter is what the store says it is.

        Raises:
            StoreError: its folder is gone or has other content.
        """
        with database.describing(f"cannot read adapter {adapter.name} v{adapter.version}"):
            intact = adapter.folder.is_dir() and hash_folder(adapter.folder) == adapter.sha256
        if not intact:
            raise StoreError(
                f"adapter {adapter.name} v{adapter.version} in {adapter.folder} is missing or was changed"
                " after it was saved; restore the folder or resume from an earlier step"
            )

    def discard_after(self, step: int, phase: Phase = "train") -> None:
        """Forget all steps after one (-1 forgets the phase), and their validations; adapter folders stay."""
        with self._writing() as session:
            queries.forget_after(session, self.run_id, phase, step)

    def save_validation(self, validation: Validation) -> None:
        """Write a validation, or replace the one of the same label and step."""
        with self._writing() as session:
            session.merge(rows.validation_row(self.run_id, validation))

    def validations(self) -> list[Validation]:
        """All validations in the order of a run: before, warm, steps, after."""
        with self._reading() as session:
            found = session.exec(select(ValidationRow).where(ValidationRow.run == self.run_id)).all()
        order = get_args(Label)
        return sorted(map(rows.validation_from, found), key=lambda made: (order.index(made.label), made.step))

    def best_versions(self) -> dict[str, int]:
        """Adapter versions of the best validation, the latest of equals; the newest where nothing was validated."""
        made = [one for one in self.validations() if one.label == "step" and one.scores]
        if made:
            return dict(max(made, key=lambda one: (one.mean, one.step)).adapters)
        return {file.name: file.version for file in self.latest_adapters()}

    def save_costs(self, totals: Iterable[Usage]) -> None:
        """Replace what each model has used by the ledger's totals."""
        costs = [{"run": self.run_id, **asdict(usage)} for usage in totals]
        with self._writing() as session:
            session.exec(delete(CostRow).where(col(CostRow.run) == self.run_id))
            queries.insert_all(session, CostRow, costs)

    def costs(self) -> list[Usage]:
        """What each model has used, by name: where a resumed run's ledger starts."""
        query = select(CostRow).where(CostRow.run == self.run_id).order_by(col(CostRow.model))
        with self._reading() as session:
            return [Usage(**row.model_dump(exclude={"run"})) for row in session.exec(query)]

    def module_table(self) -> list[ModuleStats]:
        """One line per module, by path, over all kept rollouts."""
        with self._reading() as session:
            return queries.module_table(session, self.run_id)

    def failures(self) -> dict[str, int]:
        """Number of kept rollouts per kind of failure; ``none`` counts those that were scored."""
        with self._reading() as session:
            return queries.failure_counts(session, self.run_id)

    @contextmanager
    def _reading(self) -> Iterator[Session]:
        with (
            database.describing(f"cannot read the database of run {self.folder}"),
            Session(self._engine, expire_on_commit=False) as session,
        ):
            yield session

    @contextmanager
    def _writing(self) -> Iterator[Session]:
        """One transaction, which Ctrl-C lets finish."""
        advice = f"; what was saved before is kept: mend it, then `modpo resume {self.folder}`"
        with (
            uninterrupted(),
            database.describing(f"cannot write to the database of run {self.folder}", advice),
            Session(self._engine, expire_on_commit=False) as session,
        ):
            yield session
            session.commit()


def _refuse_other_layouts(engine: Engine) -> None:
    """A shared database must hold runs of this layout only."""
    if not inspect(engine).has_table(str(RunRow.__tablename__)):
        return
    with Session(engine) as session:
        other = session.exec(select(RunRow.layout).where(RunRow.layout != LAYOUT)).first()
    if other is not None:
        raise RunVersionError(
            f"the database {engine.url!r} holds runs of store layout {other}, this modpo writes layout {LAYOUT};"
            " name another database"
        )
