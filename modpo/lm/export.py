"""A run's adapters for use elsewhere: in PEFT's form, or merged into the base model."""

import shutil
from pathlib import Path

from modpo.errors import ConfigError, PolicyError, nearest
from modpo.lm.versions import adapter_folder
from modpo.train.checkpoint import write_folder

FILES = ("adapter_model.safetensors", "adapter_config.json")


def export(run: Path, versions: dict[str, int], out: Path, *, merged: bool) -> list[Path]:
    """Write one folder per adapter.

    Args:
        run: the run folder.
        versions: the version of each adapter to take.
        out: folder that will hold one folder per adapter.
        merged: write whole models with the adapter added to the base's weights, each with its tokenizer.

    Returns:
        The folders written.

    Raises:
        PolicyError: a version is not in the run folder any more, or the base cannot be loaded.
        ConfigError: `out` already holds one of the folders.
    """
    sources = {name: adapter_folder(run, name, version) for name, version in versions.items()}
    for name, source in sources.items():
        if not source.is_dir():
            kept = sorted(folder.name for folder in source.parent.glob("v*"))
            raise PolicyError(f"{name} {source.name} is not kept in {run}; {nearest(source.name, kept)}")
    targets = {name: out / source.parent.name for name, source in sources.items()}
    for target in targets.values():
        if target.exists():
            raise ConfigError(f"{target} already exists; name another folder with --out")
    for name, source in sources.items():
        if merged:
            _write_merged(source, targets[name])
        else:
            write_folder(targets[name], lambda work, source=source: _copy(source, work))  # type: ignore[misc]
    return list(targets.values())


def _copy(source: Path, work: Path) -> None:
    for name in FILES:
        shutil.copyfile(source / name, work / name)


def _write_merged(source: Path, target: Path) -> None:
    from modpo.lm.local.merge import write_merged

    write_folder(target, lambda work: write_merged(source, work))
