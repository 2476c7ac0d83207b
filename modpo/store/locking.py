"""The lock of a run folder: one process works on a run at a time."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from modpo.errors import RunLockedError
from modpo.store.database import describing
from modpo.store.files import write_whole

LOCK = "lock"
HOLDER = "lock.json"
TIMEOUT_S = 1.0
"""Long enough to outlast the instant for which `held` takes the lock, short enough not to be felt."""


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold the run against other processes; the lock goes with the process, however it ends.

    Raises:
        RunLockedError: another process works on the run; the message names it.
        StoreError: the folder cannot be written.
    """
    lock = FileLock(folder / LOCK)
    with describing(f"cannot lock the run {folder}"):
        try:
            lock.acquire(timeout=TIMEOUT_S)
        except Timeout:
            raise RunLockedError(
                f"another process ({_holder(folder)}) is working on run {folder};"
                " wait for it to end, or stop it and resume the run"
            ) from None
    try:
        with describing(f"cannot lock the run {folder}"):
            write_whole(folder / HOLDER, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        yield
    finally:
        lock.release()


def held(folder: Path) -> bool:
    """Whether some process, this one included, works on the run."""
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:
        return False  # a folder that may only be read is nobody's workplace
    lock.release()
    return False


def _holder(folder: Path) -> str:
    """Who holds the lock, in words."""
    try:
        found = json.loads((folder / HOLDER).read_text(encoding="utf-8"))
        return f"pid {found['pid']} on {found['host']}"
    except (OSError, ValueError, KeyError):
        return "pid not known yet"
