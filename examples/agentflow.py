"""Train AgentFlow's planner and executor in the flow, on reasoning-gym questions that each need a tool.

    python examples/agentflow.py [--seed 0] [--budget-s 4500] [--train both] [--recipe flow_grpo] [--json]

Planner, executor, verifier and generator answer from an adapter each, over one base model, after a warm start on
written traces. Flow-GRPO then trains the planner's and the executor's (or one of them); the other two keep their warm
start. No step begins that would not be done, and scored, within the budget.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import modpo
from modpo.cli_shell import run_script
from modpo.optimizers.result import RunResult
from modpo.optimizers.run import compile_task, keep_target
from modpo.programs.agentflow import gym
from modpo.task import Task

# Of an answer and its tags, with little to spare: what has not learnt the form yet goes on to the end.
MAX_TOKENS = {"planner": 16, "executor": 32, "verifier": 16, "generator": 20}
RATES = {"planner": 2e-4, "executor": 1e-4}
SETTINGS: Mapping[str, Any] = {
    "steps": 40,
    "examples_per_step": 8,
    "rollouts_per_example": 8,
    "warmup_steps": 2,
    "validate_every": 8,
    "warm_start": {"epochs": 3, "learning_rate": 3e-4, "batch_size": 8},
}
ARMS = {"planner": ("planner",), "executor": ("executor",), "both": ("planner", "executor")}


def policy_task(seed: int = 0, model: str = "smollm2-135m") -> Task:
    """Make the task, every role on an adapter of its own."""
    task = gym.task(seed)
    policy = modpo.Policy(model)
    for role, most in MAX_TOKENS.items():
        getattr(task.program, role).set_lm(policy.lm(max_tokens=most))
    return task


def rates(train: str) -> dict[str, float]:
    """The learning rate of each role when these are trained: "planner", "executor" or "both"."""
    return {role: RATES[role] if role in ARMS[train] else 0.0 for role in gym.ROLES}


def main() -> int:
    """Compile, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="base model: a known name, a hub id or a folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=SETTINGS["steps"], help="most steps")
    parser.add_argument("--budget-s", type=float, default=4500, help="wall seconds, the start of the model aside")
    parser.add_argument("--train", choices=sorted(ARMS), default="both", help="which roles learn from the reward")
    parser.add_argument("--recipe", default="flow_grpo", help="flow_grpo, gtpo, gigpo, gagpo, ...: modpo recipes")
    parser.add_argument("--run", type=Path, help="run folder; by default runs/agentflow-TRAIN-seedN-TIME")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args()
    name = f"agentflow-{options.train}-seed{options.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = options.run or Path("runs") / name
    return run_script(folder, options.json, partial(compile_and_measure, options, folder), lambda one: [describe(one)])


def compile_and_measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compile with Flow-GRPO after a warm start; successes are fractions of the held-out questions, greedy."""
    arguments = {"seed": options.seed, "model": options.model}
    task = policy_task(**arguments)
    settings = {
        **SETTINGS,
        "steps": options.steps,
        "seed": options.seed,
        "recipe": options.recipe,
        "learning_rate": rates(options.train),
        "time_limit_s": options.budget_s,
    }
    target = keep_target(folder, f"{Path(__file__).resolve()}:policy_task", **arguments)
    return figures(compile_task(task, "FlowGRPO", settings=settings, run_folder=folder, target=target))


def figures(result: RunResult) -> dict[str, Any]:
    """Success, turns and tool errors before, after the warm start and after Flow-GRPO."""
    stages = ("before", "warm", "after")
    return {
        "success": {stage: getattr(result, stage) for stage in stages},
        # nothing was measured where no rollout came to an answer
        "turns": {stage: result.measures.get(stage, {}).get("turns") for stage in stages},
        "tool_errors": {stage: result.measures.get(stage, {}).get("tool_errors") for stage in stages},
        "ci95_gain": list(result.ci95_gain or ()),
        "steps": result.steps,
        "seconds": result.seconds,
        "run": str(result.run),
    }


def describe(result: dict[str, Any]) -> str:
    """Write the result for people."""
    low, high = result["ci95_gain"]
    lines = [
        f"held-out success: {_three(result['success'], '.1%')}",
        f"mean turns: {_three(result['turns'], '.2f')}",
        f"turns that went wrong: {_three(result['tool_errors'], '.1%')}",
        f"after - warm, paired bootstrap 95 %: {low:+.1%} to {high:+.1%}",
        f"{result['steps']} steps in {result['seconds'] / 60:.0f} minutes",
        f"modpo show {result['run']}; one rollout as a transcript: modpo show {result['run']} --rollout 0",
    ]
    return "\n".join(lines)


def _three(stages: Mapping[str, float | None], form: str) -> str:
    return ", ".join(f"{stage} {'-' if value is None else format(value, form)}" for stage, value in stages.items())


if __name__ == "__main__":
    sys.exit(main())
