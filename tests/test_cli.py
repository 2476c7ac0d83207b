"""The command line: pure JSON on standard output, errors as one line with code 2."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from modpo.cli import app
from modpo.cli_shell import merge, parse_settings
from modpo.errors import ConfigError, TaskError
from modpo.store import RunInfo, StepRecord, Store
from tests.test_report import fill


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    fill(Store.create(tmp_path / "runs" / "legs-1"))
    return tmp_path / "runs"


@pytest.fixture
def modpo(runs: Path) -> Callable[..., Result]:
    def run(*words: object) -> Result:
        return CliRunner(env={"MODPO_RUNS": str(runs)}).invoke(app, [str(word) for word in words])

    return run


Modpo = Callable[..., Result]


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """Put functions in the place of a heavy room."""
    module = ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def failed(result: Result) -> str:
    """The one line of an error."""
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_runs_are_listed(modpo: Modpo, runs: Path) -> None:
    assert "legs-1" in modpo("runs").stdout
    found = json.loads(modpo("runs", "--json").stdout)["runs"]
    assert [(run["folder"], run["steps"], run["score"]) for run in found] == [(str(runs / "legs-1"), 2, 1.0)]
    assert json.loads(modpo("runs", "--json", "--runs-dir", runs / "none").stdout) == {"runs": []}


def test_a_run_is_shown_by_name_and_by_folder(modpo: Modpo, runs: Path) -> None:
    assert "plan[0].predict" in modpo("show", "legs-1").stdout
    by_name = json.loads(modpo("show", "legs-1", "--json").stdout)
    assert by_name["modules"][1]["parse_failures"] == 4
    assert json.loads(modpo("show", runs / "legs-1", "--json").stdout) == by_name


def test_showing_can_draw_the_curve(modpo: Modpo, tmp_path: Path) -> None:
    assert modpo("show", "legs-1", "--plot", tmp_path / "c.png").exit_code == 0
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_recipes_are_listed_and_shown(modpo: Modpo) -> None:
    assert "flow_grpo" in modpo("recipes").stdout
    assert "mmgrpo" in json.loads(modpo("recipes", "--json").stdout)["recipes"]
    assert "clip_high" in modpo("recipes", "show", "dapo").stdout
    assert json.loads(modpo("recipes", "show", "dapo", "--json").stdout)["clip_high"] == 0.28


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "legs-2"], "runs; allowed: legs-1; did you mean 'legs-1'?"),
        (["show", "legs-2", "--json"], "no run 'legs-2' here or in"),
        (["resume", "legs-2", "--json"], "did you mean 'legs-1'?"),
        (["eval", "legs-2"], "did you mean 'legs-1'?"),
        (["eval", "legs-1", "--split", "tset", "--json"], "did you mean 'test'?"),
        (["recipes", "show", "mmgrpoo", "--json"], "did you mean 'mmgrpo'?"),
        (["compile", "a.py:task", "--set", "steps", "--json"], "write it as name=value"),
        (["--nope"], "No such option: --nope"),
        (["show", "--json"], "Missing argument"),
        (["model"], "Missing command"),
        (["compil"], "No such command 'compil'"),
        (["demo", "--steps", "many"], "'--steps'"),
    ],
)
def test_errors_are_one_line(modpo: Modpo, words: list[str], message: str) -> None:
    assert message in failed(modpo(*words))


def test_a_damaged_run_is_an_error_and_listed(modpo: Modpo, runs: Path) -> None:
    (runs / "legs-1" / "modpo.json").write_text("{")
    assert "damaged" in failed(modpo("show", "legs-1"))
    assert "damaged" in json.loads(modpo("runs", "--json").stdout)["runs"][0]["info"]["message"]


@pytest.mark.parametrize("words", [["show", "nope", "--debug"], ["--debug", "show", "nope"]])
def test_debug_shows_the_traceback(modpo: Modpo, words: list[str]) -> None:
    result = modpo(*words)
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: no run 'nope'")
    assert "Traceback" not in modpo("show", "nope").stderr


@dataclass
class RunResult:
    run: Path
    before: float


def compiler(seen: dict[str, Any]) -> Callable[..., RunResult]:
    def compile_task(task: Any, optimizer: str, **options: Any) -> RunResult:
        seen.update(options, task=task, optimizer=optimizer)
        print("a library prints")
        subprocess.run(["echo", "a child prints"], check=True)
        store = Store.create(options["run_folder"])
        store.save_run(RunInfo(name=task.name, optimizer=optimizer))
        store.save_step(StepRecord(step=0))
        return RunResult(store.folder, float("nan"))

    return compile_task


def test_compiling_prints_one_object_and_nothing_else(
    modpo: Modpo, runs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}
    task = SimpleNamespace(name="my task/1", optimizer=None, settings={"steps": 9, "warm_start": {"epochs": 2}})
    stand_in(monkeypatch, "modpo.task", load_task=lambda target: task if target == "a.py:task" else None)
    stand_in(monkeypatch, "modpo.optimizers.run", compile_task=compiler(seen))
    words = ["--set", "steps=3", "--set", "warm_start.batch_size=4", "--set", "recipe=dapo", "--set", "timeout_s=none"]
    result = modpo("compile", "a.py:task", *words, "--json")
    folder = seen["run_folder"]
    assert json.loads(result.stdout) == {"run": str(folder), "before": None}
    assert "a library prints" in result.stderr
    assert capfd.readouterr().out == ""  # what the child process said went to standard error
    assert folder.parent == runs
    assert folder.name.startswith("my-task-1-")
    assert (seen["task"], seen["optimizer"], seen["target"]) == (task, "MMGRPO", "a.py:task")
    assert seen["settings"] == {
        "steps": 3,
        "warm_start": {"epochs": 2, "batch_size": 4},
        "recipe": "dapo",
        "timeout_s": None,
    }
    task.optimizer = "FlowGRPO"
    shown = modpo("compile", "a.py:task", "--run", runs / "named")
    assert (seen["run_folder"], seen["optimizer"]) == (runs / "named", "FlowGRPO")
    assert f"modpo show {runs / 'named'}" in shown.stdout
    assert "warm start 0" in shown.stdout
    modpo("compile", "a.py:task", "--optimizer", "MMGRPO", "--run", runs / "named2")
    assert seen["optimizer"] == "MMGRPO"


def test_the_other_commands_pass_on_what_they_were_given(
    modpo: Modpo, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs / "legs-1"
    stand_in(
        monkeypatch,
        "modpo.optimizers.run",
        resume=lambda folder, *, steps, time_limit_s: RunResult(folder, 0.5 if time_limit_s is None else time_limit_s),
        evaluate=lambda what, *, split, limit: {"what": what, "split": split, "limit": limit, "score": 0.12345},
    )
    stand_in(
        monkeypatch,
        "modpo.optimizers.demo",
        run_demo=lambda seed, run_folder, steps=40: {"run": run, "seed": seed, "steps": steps, "into": run_folder},
    )
    stand_in(
        monkeypatch,
        "modpo.lm.export",
        export=lambda folder, versions, out, *, merged: [out / f"{folder.name}-{merged}-{versions}"],
    )
    stand_in(monkeypatch, "modpo.lm.local.pull", pull=lambda name: Path("cache") / name)

    best = {"plan": 3, "solve": 2}
    monkeypatch.setattr(Store, "best_versions", lambda self: best)

    def said(*words: object) -> Any:
        result = modpo(*words, "--json")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    assert said("resume", "legs-1") == {"run": str(run), "before": 0.5}
    assert said("resume", "legs-1", "--time-limit-s", "60") == {"run": str(run), "before": 60.0}
    assert said("eval", "legs-1", "--limit", 3)["what"] == str(run)
    assert said("eval", "a.toml", "--split", "val") == {
        "what": "a.toml",
        "split": "val",
        "limit": None,
        "score": 0.12345,
    }
    assert said("demo", "--seed", 2, "--run", "x") == {"run": str(run), "seed": 2, "steps": 40, "into": "x"}
    assert said("demo", "--steps", 0)["steps"] == 0
    assert said("export", "legs-1", "--merged", "--version", 0)["paths"] == [
        str(run / "export" / f"legs-1-True-{dict.fromkeys(best, 0)}")
    ]
    assert said("export", "legs-1", "--out", "o")["paths"] == [f"o/legs-1-False-{best}"]
    assert said("model", "pull", "smollm2-135m") == {"name": "smollm2-135m", "folder": "cache/smollm2-135m"}
    assert "0.1235" in modpo("eval", "legs-1").stdout
    assert "export" in modpo("export", "legs-1").stdout
    assert "smollm2-135m" in modpo("model", "pull", "smollm2-135m").stdout
    assert "legs" in modpo("demo").stdout


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_errors_and_ctrl_c_in_the_work(
    modpo: Modpo, runs: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    raised: list[BaseException] = [TaskError("first\nsecond"), KeyError("x"), KeyboardInterrupt()]

    def resume(folder: Path, **changes: Any) -> None:
        raise raised.pop(0)

    stand_in(monkeypatch, "modpo.optimizers.run", resume=resume)
    assert failed(modpo("resume", "legs-1", *more)) == "error: first second\n"
    assert failed(modpo("resume", "legs-1", *more)) == "error: KeyError: 'x' (--debug shows where)\n"
    stopped = modpo("resume", "legs-1", *more)
    assert stopped.exit_code == 130
    assert stopped.stdout == ""
    assert stopped.stderr == f"stopped; continue with: modpo resume {runs / 'legs-1'}\n"


def test_settings_are_read_as_toml_values() -> None:
    assert parse_settings(["a=1", "b = 2.5", "c=true", "d=[1, 2]", 'e="x"', "f=x=y", "g.h=1", "g.i=None", "j="]) == {
        "a": 1,
        "b": 2.5,
        "c": True,
        "d": [1, 2],
        "e": "x",
        "f": "x=y",
        "g": {"h": 1, "i": None},
        "j": "",
    }
    with pytest.raises(ConfigError, match="name=value"):
        parse_settings(["=1"])
    assert merge({"a": {"b": 1}, "c": 1}, {"a": {"d": 2}, "c": {"e": 3}}) == {"a": {"b": 1, "d": 2}, "c": {"e": 3}}


def test_the_version_and_the_help(modpo: Modpo) -> None:
    assert modpo("--version").stdout == "0.1.0\n"
    said = modpo().stdout
    assert modpo("--help").stdout == said
    for command in ("demo", "compile", "eval", "runs", "show", "resume", "export", "recipes", "model"):
        assert f"\n  {command} " in said


def test_the_light_commands_load_nothing_heavy() -> None:
    heavy = {"torch", "dspy", "transformers", "scipy", "matplotlib"}
    code = f"import sys, modpo.cli; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
