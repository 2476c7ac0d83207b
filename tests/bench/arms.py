"""Which roles of AgentFlow to train: planner, executor, or both, at equal rollouts, side by side.

    python -m tests.bench.arms --model tiny --seeds 5 [--runs runs/arms] [--json]
    python -m tests.bench.arms --model smollm2-135m --seeds 3 --arms both --steps 24

A run is kept for each arm and seed; what the folder already holds is not done again, and what was stopped (Ctrl-C)
goes on, so the table may be filled over several sittings. All arms take the same number of steps and rollouts, and
those of a seed the same warm start: the first run makes it, the others begin with its adapters.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy import stats

from modpo.lm.binding import bind, bound
from modpo.optimizers.result import RunResult, result_of
from modpo.optimizers.run import compile_task
from modpo.store import Store, is_run
from modpo.task import Task
from tests.bench.tiny_agent import make_base, tiny_task
from tests.examples import load_example

example = load_example("agentflow")
TINY_RATE = 2e-3
TINY: Mapping[str, Any] = {
    "steps": 24,
    "examples_per_step": 8,
    "rollouts_per_example": 8,
    "validate_every": 8,
    "cpu_threads": 2,
}


def main() -> int:
    """Fill the table as far as asked, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny, or a base model as for examples/agentflow.py")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--arms", nargs="+", choices=list(example.ARMS), default=list(example.ARMS))
    parser.add_argument("--steps", type=int, default=TINY["steps"], help="of each run")
    parser.add_argument("--sitting-s", type=float, default=None, help="begin no run after so many seconds")
    parser.add_argument("--runs", type=Path, default=Path("runs/arms"))
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args()
    started = time.monotonic()
    for seed in seeds(options):
        for arm in options.arms:
            if options.sitting_s is None or time.monotonic() - started < options.sitting_s:
                fill(options, arm, seed)
    found = table(options)
    print(json.dumps(found) if options.json else written(found))
    return 0


def seeds(options: argparse.Namespace) -> range:
    """The seeds asked for."""
    return range(options.first_seed, options.first_seed + options.seeds)


def folder_of(options: argparse.Namespace, arm: str, seed: int) -> Path:
    """Where a run is kept."""
    return Path(options.runs) / f"{options.model.replace('/', '-')}-{arm}-seed{seed}"


def fill(options: argparse.Namespace, arm: str, seed: int) -> None:
    """Run one arm with one seed, or go on with it, unless it is done."""
    folder = folder_of(options, arm, seed)
    begun = is_run(folder)
    if begun and finished(folder) is not None:
        return
    print(f"{folder}", file=sys.stderr, flush=True)
    task, settings = setting(options, arm, seed)
    made = [one for one in example.ARMS if warm_versions(folder_of(options, one, seed))]
    if made and arm not in made:
        task = warmed(task, folder_of(options, made[0], seed))
    compile_task(task, "FlowGRPO", settings=settings, run_folder=folder, resume=begun)


def setting(options: argparse.Namespace, arm: str, seed: int) -> tuple[Task, dict[str, Any]]:
    """The task, the same for all arms of a seed, and the settings, which differ in the rates alone."""
    shared = {"recipe": "flow_grpo", "seed": seed, "steps": options.steps}
    rates = example.rates(arm)
    if options.model != "tiny":
        task = example.policy_task(seed, options.model)
        return task, {**example.SETTINGS, **shared, "learning_rate": rates}
    base = Path(options.runs) / "base"
    if not (base / "trained").exists():
        make_base(base)
        (base / "trained").touch()
    task = replace(tiny_task(base, seed), settings={})
    tiny_rates = {role: TINY_RATE if rate else 0.0 for role, rate in rates.items()}
    return task, {**TINY, **shared, "learning_rate": tiny_rates}


def warm_versions(folder: Path) -> dict[str, int]:
    """The adapters' versions after a run's warm start; empty where it has made none, or is not done with it."""
    if not is_run(folder):
        return {}
    with Store.open(folder) as store:
        measured = {made.label: made.adapters for made in store.validations()}
        return dict(measured.get("warm", {})) if store.steps("warm") else {}


def warmed(task: Task, run: Path) -> Task:
    """The task as another run's warm start left it."""
    program = bound(task.program, bind(task.program).adapters, warm_versions(run), run)
    return replace(task, program=program, traces=None)


def finished(folder: Path) -> RunResult | None:
    """The result of a run that was done to its end."""
    with Store.open(folder) as store:
        result = result_of(store, store.best_versions(), float(store.run().estimates.get("seconds", 0.0)))
        return result if store.run().status == "done" and result.after is not None else None


def table(options: argparse.Namespace) -> dict[str, Any]:
    """Per arm: success and tool errors warm and after, and over seeds the gain with its 95 % t interval."""
    arms: dict[str, Any] = {}
    for arm in options.arms:
        folders = {seed: folder_of(options, arm, seed) for seed in seeds(options)}
        made = {seed: finished(folder) for seed, folder in folders.items() if is_run(folder)}
        done = {seed: one for seed, one in made.items() if one is not None}
        arms[arm] = {"seeds": list(done), **_means(list(done.values()))}
    return {"model": options.model, "arms": arms}


def _means(results: Sequence[RunResult]) -> dict[str, Any]:
    if not results:
        return {}
    gains = [(one.after or 0.0) - (one.warm or 0.0) for one in results]
    stages = ("warm", "after")
    measured = {
        name: {stage: fmean([one.measures[stage].get(name, float("nan")) for one in results]) for stage in stages}
        for name in ("turns", "tool_errors")
    }
    return {
        "warm": fmean([one.warm or 0.0 for one in results]),
        "after": fmean([one.after or 0.0 for one in results]),
        "gain": fmean(gains),
        "gain_ci95": interval(gains),
        "gains": gains,
        **measured,
        "steps": [one.steps for one in results],
        "minutes": fmean([one.seconds for one in results]) / 60,
    }


def interval(values: Sequence[float]) -> list[float] | None:
    """Student's 95 % interval of the mean over seeds; None for fewer than two."""
    if len(values) < 2:
        return None
    if min(values) == max(values):  # scipy's is no number then
        return [values[0], values[0]]
    low, high = stats.t.interval(0.95, len(values) - 1, loc=fmean(values), scale=stats.sem(values))
    return [float(low), float(high)]


def written(found: Mapping[str, Any]) -> str:
    """The table in Markdown."""
    lines = [
        "| trained | seeds | steps | warm | after | gain, 95 % | turns | tool errors | minutes |",
        "| --- " * 9 + "|",
    ]
    for arm, row in found["arms"].items():
        if not row["seeds"]:
            lines.append(f"| {arm} | 0 |" + " |" * 7)
            continue
        ends = "" if row["gain_ci95"] is None else " ({:+.3f} to {:+.3f})".format(*row["gain_ci95"])
        cells = [
            arm,
            str(len(row["seeds"])),
            ", ".join(map(str, sorted(set(row["steps"])))),
            f"{row['warm']:.3f}",
            f"{row['after']:.3f}",
            f"{row['gain']:+.3f}{ends}",
            f"{row['turns']['warm']:.2f} → {row['turns']['after']:.2f}",
            f"{row['tool_errors']['warm']:.2f} → {row['tool_errors']['after']:.2f}",
            f"{row['minutes']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
