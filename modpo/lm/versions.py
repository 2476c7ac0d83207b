"""Where the versions of an adapter are kept in a run folder, and where a run folder is."""

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from modpo.errors import PolicyError


def adapter_folder(run: Path, name: str, version: int) -> Path:
    """Where a version of an adapter is saved: ``adapters/<name>/v<version>``, the name made safe for a path."""
    safe = quote(name, safe="[]")
    return run / "adapters" / (f"%2E{safe[1:]}" if safe.startswith(".") else safe) / f"v{version}"


def find_run(saved: str) -> Path:
    """A run folder by the path it had when the program was saved, or by its name under the runs folder.

    Raises:
        PolicyError: it is in neither place.
    """
    where = Path(saved)
    places = [where, Path(os.environ.get("MODPO_RUNS", "runs")) / where.name]
    for place in places:
        if (place / "adapters").is_dir():
            return place
    looked = " or ".join(str(place) for place in places)
    raise PolicyError(f"the run folder of this program is not at {looked}; put it there, or set MODPO_RUNS")


def find_version(run: str | None, adapter: str | None, version: int | None) -> Path | None:
    """Folder of the adapter version that answers; None when the base answers (no adapter, or version 0).

    Raises:
        PolicyError: a trained version without a run folder, or one that is gone.
    """
    if adapter is None or not version:
        return None
    if run is None:
        raise PolicyError(f"{adapter}@v{version} is kept in a run folder: give run= too")
    folder = adapter_folder(find_run(run), adapter, version)
    if not folder.is_dir():
        raise PolicyError(f"{adapter}@v{version} is not in {folder}; a finished run keeps its best and last versions")
    return folder


def serving(versions: Mapping[str, int], run: Path) -> dict[str, Path]:
    """Folders of the trained versions that are to answer, by ``name@vN``; version 0 is the base and has none."""
    return {f"{name}@v{version}": adapter_folder(run, name, version) for name, version in versions.items() if version}
