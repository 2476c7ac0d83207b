"""Sampling for the loop: which examples a step draws, the rollouts that it lacks, and steps that are drawn ahead.

Without `max_staleness` a step is sampled when the one before it has been learnt. With it, a thread samples up to that
many steps ahead while the trainer works, each with the versions of the adapters that are newest when it begins.
"""

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Self, final

from modpo.credit.grouping import examples_with_spread
from modpo.credit.turns import fits
from modpo.errors import ModpoError
from modpo.experiment import Experiment, State
from modpo.lm.binding import bound
from modpo.lm.versions import serving
from modpo.records import Rollout
from modpo.rollout import Job, run


@dataclass(frozen=True, slots=True)
class Batch:
    """What was sampled for a step, and where the drawing of examples stands after it."""

    rollouts: list[Rollout]
    cursor: int


def sample(
    x: Experiment, step: int, cursor: int, versions: Mapping[str, int], stop: threading.Event | None = None
) -> Batch:
    """The rollouts of a step: G of each example, drawn again while the recipe misses examples with spread."""
    s = x.settings
    before = x.store.rollouts(step) or ()  # of an interrupted attempt; what the metric failed on is redone
    kept = {(r.example, r.sample): r for r in before if r.failure != "metric" and _judged(x, r)}
    rollouts: list[Rollout] = []
    for _ in range(x.recipe.max_draws):
        seen = {rollout.example for rollout in rollouts}
        drawn, cursor = _draw(x, cursor)
        jobs = [
            Job(example_index=at, example=x.trainset[at], sample=g, step=step)
            for at in drawn
            if at not in seen
            for g in range(s.rollouts_per_example)
        ]
        rollouts += _run_missing(x, versions, jobs, kept, rollouts, stop)
        if len(examples_with_spread(rollouts)) >= s.examples_per_step:
            break
    x.store.save_rollouts(step, rollouts)
    return Batch(rollouts, cursor)


def _judged(x: Experiment, rollout: Rollout) -> bool:
    """Whether the metric's word on turns can be used; where not, the step was given up, and the metric mended since."""
    return not x.recipe.by_turns or fits(rollout, x.recipe.turn_opener)


def _draw(x: Experiment, cursor: int) -> tuple[list[int], int]:
    """The next examples, in a new random order for every pass over the training set, and the cursor after them."""
    size, wanted = len(x.trainset), min(x.settings.examples_per_step, len(x.trainset))
    found: list[int] = []
    while len(found) < wanted:
        epoch, at = divmod(cursor, size)
        order = random.Random(f"{x.settings.seed}/{epoch}").sample(range(size), size)
        if order[at] not in found:
            found.append(order[at])
        cursor += 1
    return found, cursor


def _run_missing(
    x: Experiment,
    versions: Mapping[str, int],
    jobs: list[Job],
    kept: Mapping[tuple[int, int], Rollout],
    before: list[Rollout],
    stop: threading.Event | None,
) -> list[Rollout]:
    """Run the jobs whose rollouts are not kept from an interrupted attempt at this step."""
    keys = [(job.example_index, job.sample) for job in jobs]
    if x.settings.deterministic and not all(key in kept for key in keys):
        kept = {}  # a batch's shape may show in the last bit: all again, or none
    missing = [job for job, key in zip(jobs, keys, strict=True) if key not in kept]
    try:
        fresh = execute(x, versions, missing, "train", x.settings.temperature, stop)
    except ModpoError as error:
        ended = [r for r in error.rollouts if isinstance(r, Rollout)]
        step = jobs[0].step
        x.store.save_rollouts(step, [*before, *(kept[key] for key in keys if key in kept), *ended])
        raise
    found = {**kept, **{(rollout.example, rollout.sample): rollout for rollout in fresh}}
    return [found[key] for key in keys]


def execute(
    x: Experiment,
    versions: Mapping[str, int],
    jobs: Sequence[Job],
    phase: str,
    temperature: float,
    stop: threading.Event | None = None,
) -> list[Rollout]:
    """Run jobs with these versions of the adapters."""

    def done(_: Rollout) -> None:
        x.watch.advance(phase)
        x.store.save_costs(x.ledger.totals())  # at once: money that a killed run spent is spent

    program = bound(x.program, x.binding.adapters, versions, x.store.folder)
    x.binding.policy.sampler.prepare(serving(versions, x.store.folder))
    return run(
        jobs,
        program=program,
        metric=x.metric,
        sampler=x.binding.policy.sampler,
        threads=x.settings.threads,
        timeout_s=x.settings.timeout_s,
        failure_reward=x.settings.failure_reward,
        temperature=temperature,
        run_seed=x.settings.seed,
        ledger=x.ledger,
        stop=stop,
        on_done=done,
    )


@final
class Batches:
    """The batches of the steps to come, in order; a context, at whose end a thread that samples ahead is stopped."""

    def __init__(self, x: Experiment, state: State) -> None:
        self._x, self._state = x, state
        self._ahead = x.settings.max_staleness
        self._stop = threading.Event()
        self._may_begin = threading.Semaphore(0)  # how many steps the thread may still begin
        self._ready: SimpleQueue[Batch | BaseException] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._may_begin.release()
        if self._thread is not None:
            self._thread.join()

    def take(self) -> Batch:
        """The batch of the state's step; raises what its sampling raised."""
        state = self._state
        if self._ahead is None:
            return sample(self._x, state.step, state.cursor, state.versions)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._sample_all, args=(state.step, state.cursor), name="modpo-ahead"
            )
            self._thread.start()
            self._may_begin.release(self._ahead)
        self._may_begin.release()  # training of this step begins: one more may be sampled meanwhile
        batch = self._ready.get()
        if isinstance(batch, BaseException):
            raise batch
        return batch

    def _sample_all(self, first: int, cursor: int) -> None:
        try:
            for step in range(first, self._x.settings.steps):
                self._may_begin.acquire()
                if self._stop.is_set():
                    return
                batch = sample(self._x, step, cursor, dict(self._state.versions), self._stop)
                cursor = batch.cursor
                self._ready.put(batch)
        except BaseException as error:  # noqa: BLE001 - the thread that trains raises it
            self._ready.put(error)
