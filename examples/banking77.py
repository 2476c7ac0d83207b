"""Compile a two-module classifier (shortlist -> decide) of bank customers' messages, 20 intents of BANKING77.

    python examples/banking77.py --data DIR [--seed 0] [--steps 24] [--json]

DIR holds banking77_train.csv and banking77_test.csv (columns text,category); a hub name works where
the package `datasets` is installed. Trained on the training file only; measured on the test file.
"""

import argparse
import csv
import random
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import dspy

import modpo
from modpo.cli_shell import run_script
from modpo.errors import TaskError
from modpo.optimizers.run import compile_task, keep_target
from modpo.programs.xml import XMLPredict
from modpo.task import Task

INTENTS, SHORTLIST = 20, 2
TRACES, VAL, TEST = 96, 128, 200
MAX_TOKENS = 40  # a shortlist of the longest names, and its tags
SETTINGS = {
    "steps": 24,
    # many messages, few samples of each: what is to be learnt differs from message to message
    "examples_per_step": 16,
    "rollouts_per_example": 4,
    # decide keeps its warm start: it mostly copies the shortlist's first intent, so its own rewards are mostly noise
    "learning_rate": {"shortlist": 1e-4, "decide": 0.0},
    "warmup_steps": 4,
    "validate_every": 8,
    "warm_start": {"epochs": 3, "learning_rate": 3e-4, "batch_size": 8},
}


class Classify(dspy.Module):
    """Shortlist two intents for a message, then decide for one."""

    def __init__(self, intents: Sequence[str]) -> None:
        super().__init__()
        listed = f"List the {SHORTLIST} likeliest of: {', '.join(intents)}."
        self.shortlist = XMLPredict(dspy.Signature("message -> intents", listed))
        self.decide = XMLPredict(dspy.Signature("message, intents -> intent", "Choose the intent."))

    def forward(self, message: str) -> dspy.Prediction:
        """Answer with an intent."""
        intents = self.shortlist(message=message).intents
        return dspy.Prediction(intents=intents, intent=self.decide(message=message, intents=intents).intent)


def accuracy(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> float:  # noqa: ARG001
    """Score 1 for the right intent, else 0."""
    return float(prediction.intent.strip().lower() == example.intent)


def read(data: str, split: str) -> list[tuple[str, str]]:
    """Read (message, intent) pairs of a split, "train" or "test", from a folder or the hub."""
    path = Path(data) / f"banking77_{split}.csv"
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as stream:
            rows: list[dict[str, Any]] = list(csv.DictReader(stream))
        return [(row["text"].strip(), intent_name(row["category"])) for row in rows]
    if Path(data).exists():
        raise TaskError(f"there is no {path.name} in {data}")
    try:
        from datasets import load_dataset
    except ImportError:
        raise TaskError(f"{data!r} is no folder, and for a hub name: pip install datasets") from None
    table = load_dataset(data, split=split)
    names = table.features["label"].names
    return [(row["text"].strip(), intent_name(names[row["label"]])) for row in table]


def intent_name(category: str) -> str:
    """Write a category as words: ``"Refund_not_showing_up?"`` is ``"refund not showing up"``."""
    return category.replace("_", " ").lower().rstrip("?")


def banking(data: str, seed: int) -> Task:
    """Make the task: the same 20 intents for every seed, other traces, training and held-out messages."""
    test = read(data, "test")
    held_out = {text for text, _ in test}
    train = [(text, intent) for text, intent in read(data, "train") if text not in held_out]
    intents = sorted(random.Random(77).sample(sorted({intent for _, intent in train}), INTENTS))
    rng = random.Random(seed)
    examples = []
    for split in (train, test):
        chosen = [(text, intent) for text, intent in split if intent in intents]
        kept = [dspy.Example(message=text, intent=intent).with_inputs("message") for text, intent in chosen]
        rng.shuffle(kept)
        examples.append(kept)
    shown, valset, trainset = examples[0][:TRACES], examples[0][TRACES : TRACES + VAL], examples[0][TRACES + VAL :]
    return Task(
        program=Classify(intents),
        metric=accuracy,
        trainset=trainset,
        valset=valset,
        testset=examples[1][:TEST],
        traces=write_traces(shown, intents, rng),
        name="banking77",
        settings=SETTINGS,
    )


def policy_task(data: str, seed: int, model: str) -> Task:
    """Make the task with a policy: an adapter each for shortlist and decide."""
    task = banking(data, seed)
    task.program.set_lm(modpo.PolicyLM(modpo.Policy(model), max_tokens=MAX_TOKENS))
    return task


def write_traces(shown: Sequence[Any], intents: Sequence[str], rng: random.Random) -> dict[str, list[dspy.Example]]:
    """Show the format: the right intent leads a shortlist, but stands anywhere in what `decide` is given."""
    traces: dict[str, list[dspy.Example]] = {"shortlist": [], "decide": []}
    for example in shown:
        others = rng.sample([intent for intent in intents if intent != example.intent], SHORTLIST - 1)
        message = example.message
        first = dspy.Example(message=message, intents=", ".join([example.intent, *others]))
        traces["shortlist"].append(first.with_inputs("message"))
        mixed = rng.sample([example.intent, *others], SHORTLIST)
        second = dspy.Example(message=message, intents=", ".join(mixed), intent=example.intent)
        traces["decide"].append(second.with_inputs("message", "intents"))
    return traces


def main() -> int:
    """Compile, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with the two CSV files, or a hub name")
    parser.add_argument("--model", default="smollm2-135m", help="base model: a known name, a hub id or a folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=SETTINGS["steps"])
    parser.add_argument("--run", type=Path, help="run folder; by default runs/banking77-seedN-TIME")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args()
    folder = options.run or Path("runs") / f"banking77-seed{options.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    work = partial(compile_and_measure, options, folder)
    return run_script(folder, options.json, work, lambda result: [describe(result)])


def compile_and_measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compile with mmGRPO after a warm start; accuracies are fractions of the held-out messages, greedy."""
    data = str(Path(options.data).resolve()) if Path(options.data).exists() else options.data
    arguments = {"data": data, "seed": options.seed, "model": options.model}
    task = policy_task(**arguments)
    settings = {"steps": options.steps, "seed": options.seed}
    target = keep_target(folder, f"{Path(__file__).resolve()}:policy_task", **arguments)
    result = compile_task(task, "MMGRPO", settings=settings, run_folder=folder, target=target)
    return {
        "before": result.before,
        "warm": result.warm,
        "after": result.after,
        "ci95_gain": list(result.ci95_gain),
        "minutes": round(result.seconds / 60, 1),
        "steps": result.steps,
        "run": str(result.run),
    }


def describe(result: dict[str, Any]) -> str:
    """Write the result for people."""
    low, high = result["ci95_gain"]
    return (
        f"held-out accuracy: before {result['before']:.1%}, warm {result['warm']:.1%}, after {result['after']:.1%}\n"
        f"after - warm, paired bootstrap 95 %: {low:+.1%} to {high:+.1%}\n"
        f"{result['steps']} steps in {result['minutes']} minutes; modpo show {result['run']}"
    )


if __name__ == "__main__":
    sys.exit(main())
