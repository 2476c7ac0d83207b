"""The runs that lie in a folder."""

from pathlib import Path

from modpo.errors import StoreError
from modpo.store.database import MARKER
from modpo.store.store import Store
from modpo.store.values import RunInfo, RunSummary


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run."""
    return (folder / MARKER).is_file()


def list_runs(root: Path) -> list[RunSummary]:
    """The runs directly below a folder, oldest first; runs that cannot be read are listed as failed, saying why."""
    found = []
    for marker in sorted(root.glob(f"*/{MARKER}")):
        try:
            with Store.open(marker.parent) as store:
                last = store.last_done_step()
                scores = [validation.mean for validation in store.validations()]
                summary = RunSummary(
                    folder=marker.parent,
                    info=store.run(),
                    steps=0 if last is None else last + 1,
                    score=scores[-1] if scores else None,
                )
        except StoreError as error:
            unreadable = RunInfo(name="?", optimizer="?", status="failed", message=str(error))
            summary = RunSummary(folder=marker.parent, info=unreadable, steps=0, score=None)
        found.append(summary)
    return sorted(found, key=lambda run: run.info.created)
