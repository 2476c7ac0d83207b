"""The store: the truth of a run, in one folder and one database."""

from modpo.store.files import hash_folder, uninterrupted, write_whole
from modpo.store.listing import is_run, list_runs
from modpo.store.store import Store
from modpo.store.values import (
    LAYOUT,
    AdapterFile,
    Label,
    ModuleStats,
    Phase,
    RunInfo,
    RunSummary,
    Status,
    StepRecord,
    StepSummary,
    Validation,
)

__all__ = [
    "LAYOUT",
    "AdapterFile",
    "Label",
    "ModuleStats",
    "Phase",
    "RunInfo",
    "RunSummary",
    "Status",
    "StepRecord",
    "StepSummary",
    "Store",
    "Validation",
    "hash_folder",
    "is_run",
    "list_runs",
    "uninterrupted",
    "write_whole",
]
