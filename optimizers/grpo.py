"""What the weight optimizers share: a teleprompter that checks, records and runs an experiment."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import dspy
from dspy.teleprompt.teleprompt import Teleprompter

from modpo.config import Settings
from modpo.credit import recipe
from modpo.errors import ConfigError, ModpoError
from modpo.estimate import Estimate, Phase
from modpo.experiment import Experiment
from modpo.ledger import Ledger
from modpo.lm.binding import Binding, bind, bound
from modpo.lm.recorder import stamp_paths
from modpo.loop import optimize
from modpo.optimizers.checks import Traces, check, replay_all, traces_of
from modpo.optimizers.progress import ProgressWatch
from modpo.optimizers.result import RunResult, result_of
from modpo.preflight import require_agreement
from modpo.records import Call
from modpo.store import RunInfo, Store
from modpo.task import Metric

MAY_CHANGE = frozenset({"budget", "max_errors", "patience", "steps", "threads", "time_limit_s", "timeout_s"})
"""Settings that may differ when a run goes on: they bound the work and do not shape it."""


class WeightOptimizer(Teleprompter):
    """Trains the adapters of a program's policy modules; modules with any other LM stay frozen.

    Args:
        metric: `metric(example, prediction, trace=None)` gives a finite number, a bool or a
            `dspy.Prediction` with `score`; higher is better.
        traces: verified inputs and outputs per module path; with them, a warm start comes first.
        run_folder: where the run is kept; None makes one under ``runs/``.
        store_url: SQLAlchemy URL of the run's database; None is SQLite in the run folder.
        name: of the task, for people.
        target: what `modpo resume` loads the task from; None where it cannot.
        resume: continue the run that the folder holds.
        quiet: show no progress.
        settings: any field of `modpo.Settings`.

    Raises:
        ConfigError: a setting is unknown or has a value that is not allowed.
    """

    recipe_name: ClassVar[str]

    def __init__(
        self,
        metric: Metric,
        *,
        traces: Traces | None = None,
        run_folder: Path | str | None = None,
        store_url: str | None = None,
        name: str = "task",
        target: str | None = None,
        resume: bool = False,
        quiet: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.metric = metric
        self.traces = traces
        self.run_folder = None if run_folder is None else Path(run_folder)
        self.store_url = store_url
        self.name = name
        self.target = target
        self.resume = resume
        self.quiet = quiet
        self.settings = Settings.of(**{"recipe": self.recipe_name, **settings})
        self.recipe = recipe(self.settings.recipe, **self.settings.recipe_options)
        self.result: RunResult | None = None

    def compile(
        self,
        student: dspy.Module,
        *,
        trainset: Sequence[dspy.Example],
        teacher: dspy.Module | list[dspy.Module] | None = None,
        valset: Sequence[dspy.Example] | None = None,
        testset: Sequence[dspy.Example] | None = None,
        traces: Traces | None = None,
        num_threads: int | None = None,
        max_errors: int | None = None,
        seed: int | None = None,
    ) -> dspy.Module:
        """Train a copy of the student and return it; the student itself answers as before.

        Args:
            student: a program in which at least one module answers from a `modpo.Policy`.
            trainset: examples with inputs marked.
            teacher: a program (or the first of several) whose successful rollouts become traces.
            valset: examples that choose the best version.
            testset: examples for the reported scores; None reports on `valset`.
            traces: instead of the optimizer's own.
            num_threads, max_errors, seed: instead of the settings `threads`, `max_errors` and `seed`.

        Returns:
            The compiled program; `modpo_run` is its run folder, and the optimizer's `result` has the scores.

        Raises ModpoError: something given cannot be used (before any work), or the run had to stop (all kept).
        """
        settings = self._with(threads=num_threads, max_errors=max_errors, seed=seed)
        program = _copy(student)
        binding = bind(program)
        check(self.metric, program, binding, settings, {"trainset": trainset, "valset": valset, "testset": testset})
        settings = _fixed(self._begun(settings), binding)
        calls = replay_all(program, binding, traces or self.traces or self._taught(teacher, trainset, binding))
        about = {"policy": binding.policy.describe(), "adapters": binding.adapters}  # loads the base, or says why not
        with self._store(settings, about) as store, store.lock(), _standing(store) as seconds:
            self._check_sampler(binding, store)
            sizes = len(valset or ()), len(testset or valset or ())
            with self._watch(settings, store, binding, calls, *sizes, seconds()) as watch:
                experiment = Experiment(
                    program=program,
                    binding=binding,
                    metric=self.metric,
                    settings=settings,
                    recipe=self.recipe,
                    trainset=trainset,
                    valset=valset or (),
                    testset=testset or (),
                    traces=calls,
                    store=store,
                    watch=watch,
                    ledger=Ledger(settings.budget, used=store.costs(), elapsed=seconds()),
                )
                versions = optimize(experiment)
            self.result = result_of(store, versions, seconds())
        compiled = bound(program, binding.adapters, versions, store.folder)
        compiled._compiled = True  # the root only: DSPy passes over compiled submodules
        compiled.modpo_run = store.folder
        return compiled

    def _taught(
        self, teacher: dspy.Module | list[dspy.Module] | None, trainset: Sequence[dspy.Example], binding: Binding
    ) -> Traces:
        first = teacher[0] if isinstance(teacher, list) and teacher else teacher
        if not isinstance(first, dspy.Module):
            return {}
        return traces_of(first, trainset, self.metric, tuple(binding.adapters), self.settings.teacher_threshold)

    def _begun(self, settings: Settings) -> Settings:
        """The settings with the number of threads that the run to continue was begun with.

        Raises:
            RunLockedError: another process works on that run.
            ConfigError: it was begun with other settings.
        """
        if not self.resume or self.run_folder is None:
            return settings
        with Store.open(self.run_folder) as store, store.lock():
            kept = Settings.of(**store.run().settings)
        settings = settings.model_copy(update={"cpu_threads": settings.cpu_threads or kept.cpu_threads})
        fixed = set(Settings.model_fields) - MAY_CHANGE
        changed = sorted(name for name in fixed if getattr(kept, name) != getattr(settings, name))
        if changed:
            raise ConfigError(
                f"the run in {self.run_folder} was begun with other settings ({', '.join(changed)}); continue it with "
                f"the same ones (only {', '.join(sorted(MAY_CHANGE))} may change), or name a new run folder"
            )
        return settings

    def _store(self, settings: Settings, about: Mapping[str, Any]) -> Store:
        """Make the run's store, or open the one to continue."""
        folder = self.run_folder or Path("runs") / f"{self.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        wanted = settings.model_dump(mode="json")
        if self.resume:
            store = Store.open(folder)
            store.save_run(replace(store.run(), settings=wanted, status="running", message=""))
            return store
        store = Store.create(folder, url=self.store_url)
        kind = type(self).__name__
        store.save_run(RunInfo(name=self.name, optimizer=kind, settings=wanted, target=self.target, program=about))
        return store

    def _with(self, **given: Any) -> Settings:
        """The optimizer's settings, with those of `compile` that were given."""
        return Settings.of(**self.settings.model_dump() | {k: v for k, v in given.items() if v is not None})

    def _check_sampler(self, binding: Binding, store: Store) -> None:
        binding.policy.sampler.open(store.folder, self._tell)
        require_agreement(binding.policy, store.folder)

    def _tell(self, line: str) -> None:
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    def _watch(
        self,
        s: Settings,
        store: Store,
        binding: Binding,
        calls: Mapping[str, Sequence[Call]],
        val: int,
        held: int,
        elapsed_s: float,
    ) -> ProgressWatch:
        steps = max(s.steps - _done(store.last_done_step("train")), 0)
        epochs = max(s.warm_start.epochs - _done(store.last_done_step("warm")), 0)
        unmeasured = {"before", "warm", "after"} - {v.label for v in store.validations()}
        every = s.validate_every or s.steps or 1
        checks = steps // every + 1
        phases = (
            # an untrained program mostly fails at its first module
            Phase("before", held * ("before" in unmeasured), cost=0.5),
            Phase("evaluate", held * len(unmeasured - {"before"}) + val * checks, cost=1.0),
            Phase("warm", sum(map(len, calls.values())) * epochs, cost=0.7),
            Phase("train", steps * s.examples_per_step * s.rollouts_per_example, cost=0.9),
        )
        estimate = Estimate({phase.name: phase for phase in phases})
        about = f"{binding.policy.describe()}; run folder {store.folder}"
        limit_s = None if s.time_limit_s is None else s.time_limit_s - elapsed_s
        return ProgressWatch(estimate, binding.policy.sampler, about=about, quiet=self.quiet, limit_s=limit_s)


def _done(last: int | None) -> int:
    """How many steps are done, by the number of the last."""
    return 0 if last is None else last + 1


def _fixed(settings: Settings, binding: Binding) -> Settings:
    """The settings, with the number of threads that a deterministic run keeps."""
    if not settings.deterministic:
        return settings
    if settings.max_staleness is not None:
        raise ConfigError(
            "deterministic=True and max_staleness exclude each other: what is sampled while the trainer works depends "
            "on which is faster; leave one out"
        )
    return settings.model_copy(update={"cpu_threads": binding.policy.make_deterministic(settings.cpu_threads)})


def _copy(student: dspy.Module) -> dspy.Module:
    """A copy whose predictors share the student's LMs."""
    program = student.deepcopy()
    lms = {path: predictor.lm for path, predictor in stamp_paths(student).items()}
    for path, predictor in stamp_paths(program).items():
        predictor.lm = lms[path]
    return program


@contextmanager
def _standing(store: Store) -> Iterator[Callable[[], float]]:
    """Write down how the run ended; gives a clock of the seconds it has taken, earlier sittings included."""
    begun = time.monotonic() - float(store.run().estimates.get("seconds", 0.0))

    def seconds() -> float:
        return round(time.monotonic() - begun, 1)

    try:
        yield seconds
    except KeyboardInterrupt:
        store.set_status("stopped", "interrupted", seconds=seconds())
        raise
    except ModpoError as error:
        store.set_status("failed", str(error), seconds=seconds())
        raise
    store.set_status("done", seconds=seconds())
