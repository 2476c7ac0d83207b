"""Folders that are whole or absent: written beside, flushed to disk, renamed into place."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from modpo.errors import StoreError


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a temporary folder, make it durable, and rename it to `folder`.

    Raises:
        StoreError: the disk is full or not writable; what was there before is untouched.
    """
    work = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        fill(work)
        for file in sorted(work.iterdir()):
            _flush(file)
        _flush(work)
        if folder.exists():  # left by an attempt that died before its step was recorded
            shutil.rmtree(folder)
        work.rename(folder)
        _flush(folder.parent)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
        advice = "free space and resume: the last version is whole"
        raise StoreError(f"cannot write {folder}: {error}; {advice}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
