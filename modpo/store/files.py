"""Files of a run folder: written whole or not at all, hashed, and never left half done by Ctrl-C."""

import hashlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file so that a crash leaves the old content or the new one, never a part.

    Args:
        path: the file.
        text: its new content.
        mode: permission bits, less the process's umask.

    Raises:
        OSError: the file system refuses; the old content stays.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def hash_folder(folder: Path) -> str:
    """SHA-256, in hex, of the names and contents of all files below a folder."""
    total = hashlib.sha256()
    for path in sorted(item for item in folder.rglob("*") if item.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{digest} {path.relative_to(folder).as_posix()}\n".encode())
    return total.hexdigest()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the block has ended, then let it through; only the main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: held.append(number))
    try:
        yield
    finally:
        # None stands for a handler that was not installed from Python and cannot be put back.
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if held:
            signal.raise_signal(signal.SIGINT)
