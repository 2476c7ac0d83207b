"""The house of DESIGN.md, checked on the source: who imports whom, how long things are, what is lazy."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ORDER = [
    {"errors"},
    {"config", "records"},
    {"ledger", "estimate", "task", "credit"},
    {"train"},
    {"lm"},
    {"text", "store"},
    {"rollout"},
    {"preflight"},
    {"experiment"},
    {"sampling"},
    {"loop"},
    {"report", "transcript"},
    {"optimizers"},
    {"cli", "examples"},
]
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}
TORCH_ROOMS = ("modpo.lm.local", "modpo.credit.loss", "modpo.train")
DSPY_ROOMS = ("modpo.task", "modpo.lm", "modpo.rollout", "modpo.text", "modpo.programs", "modpo.optimizers", "examples")
# Not a room: the lazy names of the package.
LAZY = "modpo"


def sources() -> dict[str, Path]:
    """Map the dotted name of every source file of ours to its path; each file once, not through the symlinks."""
    found: dict[str, Path] = {}
    for top, prefix in (("modpo", ""), ("programs", "modpo."), ("optimizers", "modpo."), ("examples", "")):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if path.is_relative_to(ROOT / "modpo/programs") or path.is_relative_to(ROOT / "modpo/optimizers"):
                continue
            found[prefix + ".".join(parts).removesuffix(".__init__")] = path
    return found


SOURCES = sources()
EVERY_FILE = {**SOURCES, **{f"tests.{p.stem}": p for p in sorted((ROOT / "tests").rglob("*.py"))}}


def room(module: str) -> str:
    """Return the room of a dotted name: ``modpo.lm.local.pull`` lies in ``lm``."""
    parts = module.split(".")
    name = parts[1] if parts[0] == "modpo" and len(parts) > 1 else parts[0]
    return "cli" if name == "__main__" or name.startswith("cli_") else name


def imports(path: Path, module: str) -> Iterator[str]:
    """Yield the dotted names a file imports, anywhere in it."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]).rstrip(".")
            # `from modpo import credit` names a room, `from modpo.credit import x` lies in one.
            yield from ([f"modpo.{alias.name}" for alias in node.names] if base == "modpo" else [base])


def within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in rooms)


def test_every_room_is_known() -> None:
    assert {room(module) for module in SOURCES if module != LAZY} <= {*RANK, "programs"}


@pytest.mark.parametrize("module", [name for name in SOURCES if name != LAZY and not name.startswith("examples")])
def test_a_room_imports_only_rooms_to_its_left(module: str) -> None:
    own = room(module)
    for name in imports(SOURCES[module], module):
        if not within(name, ("modpo",)) or room(name) == own or name == "modpo.__version__":
            continue
        if own == "programs":
            assert room(name) in {"errors", "task"}, f"{module} imports {name}"
        else:
            assert RANK[room(name)] < RANK[own], f"{module} imports {name}"


@pytest.mark.parametrize("module", SOURCES)
def test_heavy_libraries_stay_in_their_rooms(module: str) -> None:
    for name in imports(SOURCES[module], module):
        top = name.partition(".")[0]
        assert top != "vllm", f"{module} imports vllm"
        assert top != "torch" or within(module, TORCH_ROOMS), f"{module} imports torch"
        assert top != "dspy" or within(module, DSPY_ROOMS), f"{module} imports dspy"
        assert top not in {"programs", "optimizers"}, f"{module} imports {name} under its bare name"


@pytest.mark.parametrize("module", EVERY_FILE)
def test_files_and_functions_are_short(module: str) -> None:
    text = EVERY_FILE[module].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300, f"{module} is longer than 300 lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 60, f"{module}.{node.name} has {length} lines"


@pytest.mark.parametrize("name", ["programs", "optimizers"])
def test_top_folders_are_seen_through_symlinks_and_refuse_their_bare_name(name: str) -> None:
    link = ROOT / "modpo" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    command = [sys.executable, "-c", f"import {name}"]
    bare = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert bare.returncode == 1
    assert f"import modpo.{name}" in bare.stderr
    subprocess.run([sys.executable, "-c", f"import modpo.{name}"], cwd=ROOT, check=True)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, modpo, modpo.optimizers, modpo.credit, modpo.config, modpo.records; "
        "print(*sorted({'torch', 'transformers', 'dspy', 'peft', 'sqlmodel', 'litellm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == ""


def test_the_public_names_are_found_and_others_are_refused() -> None:
    import modpo

    assert modpo.LoRA(rank=8, alpha=16).scale == 2.0
    assert set(dir(modpo)) == set(modpo.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Polizy'"):
        modpo.Polizy  # noqa: B018 - the access is what is tested
