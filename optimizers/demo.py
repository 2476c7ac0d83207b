"""The demo: three modules of a small model learn to count legs, on two cores."""

from pathlib import Path
from typing import Any

from modpo.lm.policy import Policy
from modpo.optimizers.run import compile_task, keep_target
from modpo.report import plot
from modpo.store import Store
from modpo.task import Task, load_task

SETTINGS = {
    "steps": 40,
    "examples_per_step": 8,
    "rollouts_per_example": 8,
    # the verifier keeps its warm start: a verdict seldom changes an answer, so its rewards are mostly noise
    "learning_rate": {"planner": 2e-4, "executor": 1e-4, "verifier": 0.0},
    "validate_every": 10,
    # 36 updates: the form is learnt, and for most animals never shown the right number is still among the samples
    "warm_start": {"epochs": 3, "learning_rate": 3e-4, "batch_size": 8},
}
MAX_TOKENS = 24
MODEL = "smollm2-135m"


def demo_task(seed: int = 0) -> Task:
    """The demo's task with a policy: an adapter each for planner, executor and verifier."""
    made = load_task("modpo.programs.demo:task", {"seed": seed})
    made.program.set_lm(Policy(MODEL).lm(max_tokens=MAX_TOKENS))
    return made


def run_demo(seed: int = 0, run_folder: Path = Path("runs/demo"), steps: int | None = None) -> dict[str, Any]:
    """Compile the demo's program and draw its curve.

    Returns:
        ``before``, ``warm``, ``after`` (fractions), ``ci95_gain`` ([low, high] of after - warm), ``seconds``,
        ``steps``, ``run`` and ``plot``.
    """
    target = keep_target(run_folder, "modpo.optimizers.demo:demo_task", seed=seed)
    settings = {**SETTINGS, "seed": seed, **({} if steps is None else {"steps": steps})}
    result = compile_task(demo_task(seed), settings=settings, run_folder=run_folder, target=target)
    with Store.open(run_folder) as store:
        picture = plot(store, run_folder / "curve.png")
    return {
        "before": result.before,
        "warm": result.warm,
        "after": result.after,
        "ci95_gain": list(result.ci95_gain or ()),
        "seconds": result.seconds,
        "steps": result.steps,
        "run": str(result.run),
        "plot": str(picture),
    }
