"""What every command shares: errors become one line, answers a table or one JSON object, ``name=value`` settings."""

import os
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from modpo import report
from modpo.errors import ConfigError, ModpoError
from modpo.store import is_run

ERROR_CODE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count

# The error of a wrong command line; typer names only its children, and whose class it is differs by typer's version.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class Shell(TyperGroup):
    """The one place where errors become a line on standard error and an exit code."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Run a command line; ``--debug`` may stand anywhere in it and shows the traceback of an error."""
        given = list(sys.argv[1:] if args is None else args)
        debug = "--debug" in given
        given = [one for one in given if one != "--debug"]
        try:
            code = super().main(given, *rest, **{**extra, "standalone_mode": False})
        except Exception as error:  # noqa: BLE001 - the outermost frame: the failure becomes a line and a code
            if debug:
                traceback.print_exc()
            typer.echo(f"error: {_one_line(error)}", err=True)
            code = ERROR_CODE
        sys.exit(code if isinstance(code, int) else 0)


def _one_line(error: Exception) -> str:
    """What went wrong, without line breaks; an error that is not ours is named by its class."""
    said = error.format_message() if isinstance(error, _UsageError) else str(error)  # type: ignore[attr-defined]
    text = " ".join(said.split())
    if isinstance(error, ModpoError | _UsageError):
        return text
    return f"{type(error).__name__}: {text} (--debug shows where)"


def answer(as_json: bool, work: Callable[[], Any], shown: Callable[[Any], Iterable[RenderableType]]) -> None:
    """Do the work and print its result; with --json whatever the work prints goes to standard error."""
    if as_json:
        with stdout_to_stderr():
            result = work()
        typer.echo(report.to_json(result))
        return
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 160)  # a file or a pipe has no width of its own
    for one in shown(work()):
        console.print(one)


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Say after Ctrl-C how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        advice = f"continue with: modpo resume {folder}" if is_run(folder) else "nothing was begun"
        typer.echo(f"stopped; {advice}", err=True)
        raise


def run_script(folder: Path, as_json: bool, work: Callable[[], Any], shown: Callable[[Any], Iterable[Any]]) -> int:
    """`answer` for a script of its own that makes a run in `folder`; returns the script's exit code."""
    try:
        with resumable(folder):
            answer(as_json, work, shown)
    except ModpoError as error:
        typer.echo(f"error: {_one_line(error)}", err=True)
        return ERROR_CODE
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Also for what is below Python: libraries in C and child processes write to the descriptor."""
    before = sys.stdout
    before.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        before.flush()
        os.dup2(saved, 1)
        os.close(saved)


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Settings from ``name=value`` pairs: values as in TOML, bare words as text, ``none`` as None, dots for parts."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = (part.strip() for part in pair.partition("="))
        if not name or not equals:
            raise ConfigError(f"--set {pair!r}: write it as name=value, for instance steps=20")
        value: Any = None
        if text.lower() != "none":
            try:
                value = tomllib.loads(f"value = {text}")["value"]
            except tomllib.TOMLDecodeError:
                value = text
        for part in reversed(name.split(".")):
            value = {part: value}
        settings = merge(settings, value)
    return settings


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The new settings over the old ones, part by part."""
    merged = dict(old)
    for name, value in new.items():
        below = merged.get(name)
        merged[name] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def fields(values: Mapping[str, Any]) -> Table:
    """Names and values, one a line."""
    table = Table.grid(padding=(0, 2))
    for name, value in values.items():
        table.add_row(name, Text(f"{value:.4g}" if isinstance(value, float) else str(value), overflow="fold"))
    return table
