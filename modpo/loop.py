"""The loop: sample, credit, update, record. Read from top to bottom, it is how modpo works.

A step runs the program G times on each of some examples, compares the calls that may be compared, and updates
each adapter from its own calls. Every step is recorded before the next begins: a killed run continues there.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import Any

from modpo.credit import Assignment, assign
from modpo.errors import MetricError
from modpo.experiment import Experiment, State, prune, publish, restore
from modpo.records import Call, Rollout
from modpo.rollout import Job
from modpo.sampling import Batch, Batches, execute
from modpo.store import StepRecord, Validation
from modpo.store.values import Label
from modpo.train.imitation import imitate
from modpo.train.policy_gradient import Lesson, Step, reinforce

HASTE = 1.1  # what is to come is taken to last so much longer than the longest of its kind so far


def optimize(x: Experiment) -> dict[str, int]:
    """Run an experiment to its end, from where its store stands.

    Returns:
        The version of each adapter that the compiled program should answer with.

    Raises:
        ModpoError: the run cannot go on; all that was done is kept.
    """
    state = restore(x)
    measure(x, state, "before", -1)
    warm_start(x, state)
    measure(x, state, "warm", -1)
    with Batches(x, state) as batches:
        while True:
            if due(x, state.step):
                measure(x, state, "step", state.step - 1)
            if state.step >= x.settings.steps or out_of_patience(x):
                break
            if out_of_time(x, state):
                measure(x, state, "step", state.step - 1)
                break
            begun = x.ledger.elapsed
            rollouts = accept(x, state, batches.take())
            assignment = assign(x.recipe, rollouts, set(x.binding.adapters), too_old(x, state))
            metrics = learn(x, state, rollouts, assignment)
            record(x, state, rollouts, assignment, metrics)
            state.step_s = max(state.step_s, x.ledger.elapsed - begun)
    best = x.store.best_versions() or state.versions
    state.versions = dict(best)
    measure(x, state, "after", state.step - 1)
    return best


def warm_start(x: Experiment, state: State) -> None:
    """Cross-entropy on the traces, one recorded step per epoch."""
    by_adapter: dict[str, list[Call]] = {name: [] for name in x.binding.names}
    for path, calls in x.traces.items():
        by_adapter[x.binding.adapters[path]].extend(calls)
    taught = {name: calls for name, calls in by_adapter.items() if calls}
    if not taught or state.step > 0:
        return
    first = x.store.last_done_step("warm")
    for epoch in range(0 if first is None else first + 1, x.settings.warm_start.epochs):
        metrics: dict[str, float] = {}
        for name, calls in taught.items():
            found = imitate(
                state.trainer,
                name,
                calls,
                x.settings.warm_start,
                seed=x.settings.seed * 1000 + epoch,
                max_grad_norm=x.settings.max_grad_norm,
                on_batch=lambda size: x.watch.advance("warm", size),
            )
            metrics |= {f"{name}.{key}": value for key, value in found.items()}
        publish(x, state, tuple(taught))
        files = tuple(state.files.values())
        x.store.save_step(StepRecord(step=epoch, phase="warm", metrics=metrics, adapters=files))
        prune(x, state)
    for name in taught:
        state.trainer.reset_moments(name)  # another objective begins


def accept(x: Experiment, state: State, batch: Batch) -> list[Rollout]:
    """Count what the metric failed on, and refuse to go on where that is too much."""
    rollouts = batch.rollouts
    state.cursor = batch.cursor
    state.metric_errors += sum(rollout.failure == "metric" for rollout in rollouts)
    if state.metric_errors > x.settings.max_errors:
        last = next(rollout for rollout in reversed(rollouts) if rollout.failure == "metric")
        raise MetricError(
            f"the metric raised {state.metric_errors} times, max_errors is {x.settings.max_errors}; "
            f"last on example {last.example}: {last.error}"
        )
    return rollouts


def too_old(x: Experiment, state: State) -> Callable[[Call], bool] | None:
    """Says which calls are more than `max_staleness` versions old; None where sampling waits for training."""
    bound = x.settings.max_staleness
    if bound is None:
        return None
    return lambda call: call.adapter in state.versions and state.versions[call.adapter] - (call.version or 0) > bound


def learn(x: Experiment, state: State, rollouts: Sequence[Rollout], assignment: Assignment) -> dict[str, Any]:
    """Update each adapter from its own credited calls; returns the step's numbers."""
    metrics: dict[str, Any] = {}
    changed = []
    for name in x.binding.names:
        lessons = []
        for one in assignment.credited:
            call = rollouts[one.member.rollout].calls[one.member.call]
            if call.adapter == name:
                lessons.append(Lesson(call, one.advantage, one.member.rollout))
        step = _step(x, state, name)
        if not step.learning_rate:
            continue  # this adapter stays as its warm start left it
        stats = reinforce(state.trainer, name, lessons, x.recipe, step)
        changed += [name] if stats["updates"] else []
        metrics |= {f"{name}.{key}": value for key, value in stats.items()}
    publish(x, state, tuple(changed))
    metrics |= {"silent": assignment.silent, "groups": len(assignment.groups), "left_out": assignment.left_out}
    failures = [rollout.failure for rollout in rollouts if rollout.failure]
    metrics |= {"measures": means([rollout.measures or {} for rollout in rollouts])}
    metrics |= {"failures": {kind: failures.count(kind) for kind in sorted(set(failures))}}
    return metrics | {"cursor": state.cursor, "metric_errors": state.metric_errors}


def _step(x: Experiment, state: State, name: str) -> Step:
    s = x.settings
    rate = s.learning_rate[name] if isinstance(s.learning_rate, dict) else s.learning_rate
    return Step(
        learning_rate=rate * min(1.0, (state.step + 1) / (s.warmup_steps + 1)),
        weight_decay=s.weight_decay,
        max_grad_norm=s.max_grad_norm,
        updates=s.updates_per_step,
        max_tokens=x.binding.max_tokens,
        seed=s.seed * 1_000_003 + state.step,
    )


def record(
    x: Experiment, state: State, rollouts: list[Rollout], assignment: Assignment, metrics: Mapping[str, Any]
) -> None:
    """Write the step down in one transaction, and move on."""
    x.store.save_step(
        StepRecord(
            step=state.step,
            rollouts=rollouts,
            advantages={(c.member.rollout, c.member.call): c.advantage for c in assignment.credited},
            groups=assignment.groups,
            metrics=metrics,
            adapters=tuple(state.files.values()),
        )
    )
    state.step += 1
    x.watch.advance("train", 0)  # the time of the update belongs to the step
    calls = [call for rollout in rollouts for call in rollout.calls]
    x.watch.show(
        step=state.step,
        reward=sum(rollout.reward for rollout in rollouts) / len(rollouts),
        parse_failures=sum(call.parsed is False for call in calls) / max(len(calls), 1),
        silent=assignment.silent / max(len(assignment.groups), 1),
    )
    prune(x, state)


def measure(x: Experiment, state: State, label: Label, step: int) -> None:
    """Score the current versions greedily, unless the store already knows the scores.

    ``step`` validations are on the validation set, and choose; all others are on the held-out examples, and report.
    """
    examples = x.valset if label == "step" else x.heldout
    made = x.store.validations()
    if not examples or (label, step) in {(v.label, v.step) for v in made}:
        return
    same = [v for v in made if not x.testset or (v.label == "step") == (label == "step")]
    known = next((v for v in same if v.adapters == state.versions), None)
    found = _score(x, state, examples, label) if known is None else replace(known, seconds=0.0)
    x.store.save_validation(replace(found, label=label, step=step))
    x.watch.show(**{"validation" if label == "step" else label: found.mean})


def _score(x: Experiment, state: State, examples: Sequence[Any], label: Label) -> Validation:
    start = time.monotonic()
    jobs = [Job(example_index=at, example=example) for at, example in enumerate(examples)]
    phase = "before" if label == "before" else "evaluate"
    rollouts = execute(x, state.versions, jobs, phase, temperature=0.0)
    return Validation(
        label=label,
        step=-1,
        scores=tuple(rollout.reward for rollout in rollouts),
        measures=means([rollout.measures or {} for rollout in rollouts]),
        adapters=dict(state.versions),
        seconds=time.monotonic() - start,
    )


def means(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each named number over those that have it."""
    found = {name: [one[name] for one in measured if name in one] for name in dict.fromkeys(chain(*measured))}
    return {name: fmean(numbers) for name, numbers in found.items()}


def due(x: Experiment, step: int) -> bool:
    """Whether the version before `step` is to be validated: at the start, every N steps, and at the end."""
    every = x.settings.validate_every
    return step == x.settings.steps or (every is not None and step % every == 0)


def out_of_patience(x: Experiment) -> bool:
    """Whether the last `patience` validations brought no new best."""
    scores = [v.mean for v in x.store.validations() if v.label == "step"]
    patience = x.settings.patience
    return patience is not None and len(scores) > patience and max(scores[-patience:]) <= max(scores[:-patience])


def out_of_time(x: Experiment, state: State) -> bool:
    """Whether another step, the validation after it and the final scores may pass the time limit."""
    limit = x.settings.time_limit_s
    if limit is None:
        return False
    made = x.store.validations()
    chosen = max((v.seconds for v in made if v.label == "step"), default=0.0)
    reported = max((v.seconds for v in made if v.label != "step"), default=0.0)
    return x.ledger.elapsed + HASTE * (state.step_s + chosen + reported) > limit
