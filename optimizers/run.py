"""Tasks by name: compile one, continue a run of one, evaluate one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dspy

from modpo import optimizers
from modpo.errors import ConfigError, StoreError, TaskError, nearest
from modpo.lm.binding import bind, bound
from modpo.lm.policy_lm import PolicyLM
from modpo.lm.sampler import Sampler
from modpo.optimizers.grpo import WeightOptimizer
from modpo.optimizers.result import RunResult
from modpo.report import mean_interval
from modpo.rollout import Job, run
from modpo.store import Store, is_run
from modpo.task import Task, check_examples, load_task

OPTIMIZERS = tuple(optimizers.__all__)


def compile_task(
    task: Task,
    optimizer: str = "MMGRPO",
    *,
    settings: Mapping[str, Any] | None = None,
    run_folder: Path | None = None,
    target: str | None = None,
    resume: bool = False,
) -> RunResult:
    """Compile a task with an optimizer named by its class; the compiled program is saved in the run folder.

    Args:
        settings: fields of `modpo.Settings`, over the task's own.
        run_folder: where the run is kept; None makes one under ``runs/``.
        target: what names the task, so that `resume` finds it again.
        resume: continue the run in `run_folder`.

    Raises:
        ConfigError: no optimizer has that name.
    """
    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"unknown optimizer {optimizer!r}; {nearest(optimizer, OPTIMIZERS)}")
    kind: type[WeightOptimizer] = getattr(optimizers, optimizer)
    chosen = kind(
        task.metric,
        traces=task.traces,
        run_folder=run_folder,
        name=task.name,
        target=target,
        resume=resume,
        **{**task.settings, **(settings or {})},
    )
    compiled = chosen.compile(
        task.program, trainset=task.trainset, valset=task.valset, testset=task.testset, teacher=task.teacher
    )
    assert chosen.result is not None
    compiled.save(str(chosen.result.run / "program.json"))
    return chosen.result


def keep_target(folder: Path, target: str, **arguments: str | float | bool) -> str:
    """Write down in a run folder how its task is made, so that the run can be continued from its folder alone.

    Args:
        target: a function, as `load_task` takes it.
        arguments: what the function is called with.

    Returns:
        The target to give to `compile_task`.

    Raises:
        StoreError: the folder already holds a run.
    """
    if is_run(folder):
        raise StoreError(f"{folder} already holds a run: continue it with `modpo resume`, or name a new folder")
    lines = [f"target = {json.dumps(target)}", "", "[arguments]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in arguments.items()]  # such JSON values are TOML too
    folder.mkdir(parents=True, exist_ok=True)
    file = folder.resolve() / "task.toml"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file)


def resume(folder: Path, steps: int | None = None, time_limit_s: float | None = None) -> RunResult:
    """Continue a run where it was stopped; a finished one gives its result again.

    Args:
        steps: RL steps in all, where it is to be longer or shorter than it was begun.
        time_limit_s: wall seconds of all sittings, likewise.

    Raises:
        StoreError: the folder holds no run, or one whose task cannot be found by name.
    """
    with Store.open(folder) as store:
        info = store.run()
    if info.target is None:
        raise StoreError(
            f"the run in {folder} was started from Python; continue it there: the same optimizer with "
            f"run_folder={str(folder)!r} and resume=True"
        )
    task = load_task(info.target)
    changed = {"steps": steps, "time_limit_s": time_limit_s}
    settings = {**info.settings, **{name: value for name, value in changed.items() if value is not None}}
    return compile_task(task, info.optimizer, settings=settings, run_folder=folder, target=info.target, resume=True)


def evaluate(what: str, *, split: str = "test", limit: int | None = None) -> dict[str, Any]:
    """Score a task's program as it is, or the compiled program of a run, greedily.

    Args:
        what: a target, or a run folder.
        split: ``train``, ``val`` or ``test``.
        limit: most examples.

    Returns:
        ``score`` (mean), ``ci95`` (bootstrap), ``n``, ``failures`` by kind, ``split``, ``target`` and the
        adapters' ``versions``.
    """
    target, versions, folder = what, {}, None
    if Path(what).is_dir():
        folder = Path(what)
        with Store.open(folder) as store:
            target = store.run().target or ""
            versions = store.best_versions()
        if not target:
            raise StoreError(f"the run in {what} was started from Python and names no task; evaluate it there")
    task = load_task(target)
    examples = list({"train": task.trainset, "val": task.valset, "test": task.testset}[split] or ())[:limit]
    check_examples(task.program, examples, f"{split} set")
    program = task.program
    if folder is not None and versions:
        program = bound(program, bind(program).adapters, versions, folder)
    jobs = [Job(example_index=at, example=example) for at, example in enumerate(examples)]
    rollouts = run(jobs, program=program, metric=task.metric, sampler=_sampler(program), temperature=0.0)
    failures = [rollout.failure for rollout in rollouts if rollout.failure]
    scores = [rollout.reward for rollout in rollouts]
    return {
        "target": target,
        "split": split,
        "n": len(scores),
        "score": sum(scores) / len(scores),
        "ci95": list(mean_interval(scores)),
        "failures": {kind: failures.count(kind) for kind in sorted(set(failures))},
        "versions": versions,
    }


def _sampler(program: dspy.Module) -> Sampler:
    for predictor in program.predictors():
        lm = predictor.lm or dspy.settings.lm
        if isinstance(lm, PolicyLM):
            return lm.policy.sampler
    raise TaskError("no module of the program answers from a policy; set one: program.set_lm(policy.lm())")
