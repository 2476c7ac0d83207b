"""Where a run's rows live: the marker file of the run folder, the engine, and what a broken database is called."""

import json
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from modpo.errors import RunVersionError, StoreError
from modpo.store.files import write_whole
from modpo.store.values import LAYOUT

MARKER = "modpo.json"
DATABASE = "run.db"


@dataclass(frozen=True, slots=True)
class Marker:
    """What makes a folder a run: its id in the database, and the database's URL (None for `run.db` in the folder)."""

    run: str
    url: str | None


def new_marker(url: str | None) -> Marker:
    """A marker for a new run; a relative SQLite path is made absolute, so that the run opens from anywhere."""
    if url is None:
        return Marker(uuid.uuid4().hex, None)
    with describing(f"cannot use the database URL {url!r}"):
        parts = make_url(url)
    if parts.get_backend_name() == "sqlite":
        if parts.database in (None, "", ":memory:"):
            raise StoreError(f"the database {url!r} lives in memory and could not be resumed; name a file or a server")
        parts = parts.set(database=str(Path(str(parts.database)).resolve()))
    return Marker(uuid.uuid4().hex, parts.render_as_string(hide_password=False))


def write_marker(folder: Path, marker: Marker) -> None:
    """Make the folder a run; the file may hold a password and is readable by its owner only."""
    text = json.dumps({"layout": LAYOUT, "run": marker.run, "url": marker.url})
    write_whole(folder / MARKER, text + "\n", mode=0o600)


def read_marker(folder: Path) -> Marker:
    """Read the marker of a run folder.

    Raises:
        StoreError: the folder is no run, or its marker cannot be read.
        RunVersionError: another version of the layout wrote it.
    """
    path = folder / MARKER
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        layout, marker = found["layout"], Marker(found["run"], found["url"])
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{folder} is not a run folder: it has no {MARKER}; `modpo runs` lists the runs") from None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise StoreError(f"{path} is damaged; it should hold layout, run and url as JSON") from None
    if layout != LAYOUT:
        raise RunVersionError(
            f"{folder} has store layout {layout}, this modpo reads layout {LAYOUT};"
            " use the version of modpo that wrote it, or start a new run"
        )
    return marker


def database_url(folder: Path, marker: Marker) -> URL:
    """The URL of the run's database."""
    if marker.url is None:
        return URL.create("sqlite", database=str(folder.resolve() / DATABASE))
    return make_url(marker.url)


def connect(url: URL) -> Engine:
    """Make the engine; SQLite gets a write-ahead log, full synchronisation and patience with other writers.

    SQLite connections are not pooled: closing the last one folds the log back, so that a run at rest is one file.
    """
    with describing(f"cannot use the database {url!r}"):
        if url.get_backend_name() != "sqlite":
            return create_engine(url, pool_pre_ping=True)
        engine = create_engine(url, poolclass=NullPool, connect_args={"timeout": 30.0})
    event.listen(engine, "connect", _set_up_sqlite)
    return engine


def _set_up_sqlite(connection: sqlite3.Connection, _record: Any) -> None:
    for pragma in ("journal_mode=WAL", "synchronous=FULL"):
        connection.execute(f"PRAGMA {pragma}").close()


@contextmanager
def describing(what: str, advice: str = "") -> Iterator[None]:
    """Turn the errors of databases, drivers and file systems into one readable `StoreError`."""
    try:
        yield
    except (SQLAlchemyError, OSError, ImportError) as error:
        cause = getattr(error, "orig", None) or error
        reason = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        raise StoreError(f"{what}: {reason}{advice}") from error
