"""Runs a program on examples; whatever goes wrong inside a run is data, and is kept."""

import contextvars
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import dspy
from dspy.utils.exceptions import AdapterParseError

from modpo.errors import MetricError, ModpoError, PromptTooLongError, RolloutTimeoutError, StoppedError
from modpo.ledger import Ledger
from modpo.lm.calm import calm_dspy
from modpo.lm.copies import Copies
from modpo.lm.recorder import Recorder, describe, stamp_paths
from modpo.lm.sampler import Sampler
from modpo.records import Failure, Rollout
from modpo.task import Metric, apply_metric, as_score, prediction_text

STOP_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rollout to run.

    Attributes:
        example_index: index of the example in its data set.
        example: the example, with its inputs marked.
        sample: which of the example's rollouts this is.
        step: training step, -1 outside of training.
    """

    example_index: int
    example: dspy.Example
    sample: int = 0
    step: int = -1


def run(
    jobs: Sequence[Job],
    *,
    program: dspy.Module,
    metric: Metric,
    sampler: Sampler,
    threads: int = 64,
    timeout_s: float | None = 600.0,
    failure_reward: float = 0.0,
    temperature: float | None = None,
    run_seed: int = 0,
    ledger: Ledger | None = None,
    stop: threading.Event | None = None,
    on_done: Callable[[Rollout], None] | None = None,
) -> list[Rollout]:
    """Run a program on examples, several at a time, and score each run.

    Each rollout works on its own copy of the program; LMs are shared. A failed parse, a crash, a time-out or a
    raising metric gives the failure reward and keeps the calls made so far.

    Args:
        jobs: what to run.
        program: is not changed, except that its predictors learn their paths.
        metric: see `Task.metric`; runs outside of the recording, so that a judge's calls are not the program's.
        sampler: is told when rollouts begin and end, so that it can form full batches.
        threads: most programs that run at the same time.
        timeout_s: per rollout, in seconds, the metric included; None for no limit. The thread of a rollout that
            exceeds it is given up, and each LM call it still tries is refused.
        failure_reward: reward of a rollout that failed.
        temperature: of every policy call; None leaves it to the program.
        run_seed: all policy calls' seeds follow from it, the job and the call's place in its rollout.
        ledger: counts tokens and money of every call, and refuses one that would pass the budget.
        stop: set by another thread to end it within half a second, with a `StoppedError`.
        on_done: called in this thread for each rollout that ends.

    Returns:
        Rollouts in the order of the jobs.

    Raises:
        MetricError: the metric returned no finite number.
        ModpoError: the sampler or the policy cannot work (`SamplerError`, `PolicyError`), or a budget is spent.
        All of these carry the rollouts that ended, in job order, as `error.rollouts`.
    """
    calm_dspy()
    stamp_paths(program)
    ledger = ledger or Ledger()
    copies = Copies(program, ledger)
    return _Pool(
        jobs, copies, metric, sampler, threads, timeout_s, failure_reward, temperature, run_seed, ledger, stop, on_done
    ).run()


@dataclass(slots=True, eq=False)
class _Live:
    """A rollout that runs: `scoring` when only its metric still does."""

    index: int
    job: Job
    recorder: Recorder
    deadline: float
    started: float = field(default_factory=time.perf_counter)
    scoring: bool = False


@dataclass(frozen=True, slots=True)
class _Ended:
    """How a rollout ended; `error` is one that stops the run, `rollout` is None where there is nothing to keep."""

    rollout: Rollout | None
    error: ModpoError | None = None


@final
@dataclass
class _Pool:
    """One thread per running rollout; the caller's thread starts them, times them and takes what they post.

    The sampler is told of a successor before its predecessor leaves, so that the number of rollouts a batch waits for
    never depends on how fast threads start.
    """

    jobs: Sequence[Job]
    copies: Copies
    metric: Metric
    sampler: Sampler
    threads: int
    timeout_s: float | None
    failure_reward: float
    temperature: float | None
    run_seed: int
    ledger: Ledger
    stop: threading.Event | None
    on_done: Callable[[Rollout], None] | None

    def __post_init__(self) -> None:
        self._pending = deque(enumerate(self.jobs))
        self._live: list[_Live] = []
        self._results: dict[int, Rollout] = {}
        self._events: queue.SimpleQueue[tuple[_Live, _Ended | BaseException | None]] = queue.SimpleQueue()
        self._error: ModpoError | None = None

    def run(self) -> list[Rollout]:
        """Run all jobs; see `run`."""
        try:
            self._fill()
            # A metric's fault lets the running programs end; any other error has broken what they work with.
            while any(live.scoring or isinstance(self._error, MetricError | None) for live in self._live):
                event = self._next()
                if event is not None:
                    self._take(*event)
        finally:
            # Reached with live rollouts only on the way out of an error or Ctrl-C.
            for live in self._live:
                live.recorder.close()
                if not live.scoring:
                    self.sampler.leave_rollout()
        rollouts = [self._results[index] for index in sorted(self._results)]
        if self._error is not None:
            self._error.rollouts = tuple(rollouts)
            raise self._error
        return rollouts

    def _fill(self) -> None:
        admitted: list[_Live] = []
        while self._pending and self._error is None:
            scoring = sum(live.scoring for live in self._live)
            if len(self._live) - scoring >= self.threads or scoring > self.threads:
                break
            admitted.append(self._admit(*self._pending.popleft()))
        for live in admitted:  # once the sampler knows of all: none must make a batch of its own
            # Threads of ours inherit the caller's dspy settings; daemons, since one may be given up while it hangs.
            context, name = contextvars.copy_context(), f"rollout-{live.index}"
            threading.Thread(target=context.run, args=(self._work, live), name=name, daemon=True).start()

    def _admit(self, index: int, job: Job) -> _Live:
        recorder = Recorder(
            run_seed=self.run_seed,
            step=job.step,
            example=job.example_index,
            sample=job.sample,
            temperature=self.temperature,
            ledger=self.ledger,
        )
        limit = float("inf") if self.timeout_s is None else self.timeout_s
        live = _Live(index, job, recorder, time.perf_counter() + limit)
        self._live.append(live)
        self.sampler.enter_rollout()
        return live

    def _next(self) -> tuple[_Live, _Ended | BaseException | None] | None:
        """What a rollout posted, or that one ran out of time; None when there is nothing yet."""
        if self.stop is not None and self.stop.is_set():
            self._error = self._error or StoppedError("sampling was stopped")
            return None
        first = min(self._live, key=lambda live: live.deadline)
        wait_s = min(first.deadline - time.perf_counter(), float("inf") if self.stop is None else STOP_POLL_S)
        try:
            return self._events.get(timeout=None if wait_s == float("inf") else max(0.0, wait_s))
        except queue.Empty:
            if time.perf_counter() < first.deadline:
                return None
            first.recorder.close()
            message = f"the rollout ran longer than {self.timeout_s:g} s"
            return first, _Ended(self._failed(first, "timeout", message))

    def _take(self, live: _Live, event: _Ended | BaseException | None) -> None:
        if live not in self._live:
            return  # given up earlier
        if isinstance(event, BaseException):
            raise event
        if event is None:
            # The program ended: its place is free, while its metric may take longer.
            self._replace(live, scoring=True)
            return
        self._error = self._error or event.error
        if event.rollout is not None:
            self._results[live.index] = event.rollout
            if self.on_done is not None:
                self.on_done(event.rollout)
        self._replace(live, scoring=False)

    def _replace(self, live: _Live, *, scoring: bool) -> None:
        left = live.scoring
        live.scoring = True
        if not scoring:
            self._live.remove(live)
        self._fill()
        if not left:
            self.sampler.leave_rollout()

    def _work(self, live: _Live) -> None:
        try:
            ended: _Ended | BaseException = self._rollout(live)
        except BaseException as error:  # noqa: BLE001 - not the program's fault but ours: raised in the caller's thread
            ended = error
        self._events.put((live, ended))

    def _rollout(self, live: _Live) -> _Ended:
        prediction = None
        failure: BaseException | None = None
        try:
            program = self.copies.make()
            with live.recorder.active():
                prediction = program(**live.job.example.inputs())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a program's failure is data
            failure = error
        self._events.put((live, None))
        if live.recorder.fatal is not None:
            return _Ended(None, live.recorder.fatal)
        if failure is not None:
            return _Ended(self._failed(live, kind_of(failure), describe(failure)))
        return self._score(live, prediction)

    def _score(self, live: _Live, prediction: Any) -> _Ended:
        job, text = live.job, prediction_text(prediction)
        try:
            value = apply_metric(self.metric, job.example, prediction)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a metric's failure is data
            kind: Failure = "timeout" if kind_of(error) == "timeout" else "metric"
            return _Ended(self._failed(live, kind, describe(error), text))
        try:
            score = as_score(value, f"example {job.example_index}")
        except MetricError as error:
            return _Ended(self._failed(live, "metric", describe(error), text), error)
        told = {name: getattr(score, name) for name in ("feedback", "turn_scores", "turn_states", "measures")}
        return _Ended(self._record(live, score.score, prediction=text, **told))

    def _failed(self, live: _Live, failure: Failure, error: str, prediction: str | None = None) -> Rollout:
        return self._record(live, self.failure_reward, failure=failure, error=error, prediction=prediction)

    @staticmethod
    def _record(live: _Live, reward: float, **more: Any) -> Rollout:
        return Rollout(
            step=live.job.step,
            example=live.job.example_index,
            sample=live.job.sample,
            calls=live.recorder.calls(),
            reward=reward,
            seconds=time.perf_counter() - live.started,
            **more,
        )


def kind_of(error: BaseException | None) -> Failure:
    """What kind of failure an exception that left a program, or a metric, is, by it and its causes."""
    while error is not None:
        if isinstance(error, PromptTooLongError):
            return "prompt"
        if isinstance(error, RolloutTimeoutError):
            return "timeout"
        if isinstance(error, AdapterParseError):
            return "parse"
        error = error.__cause__
    return "program"
