"""An experiment and its state: what a run is made of, and where it stands, made anew from the store on resume."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from modpo.config import Settings
from modpo.credit import Recipe
from modpo.ledger import Ledger
from modpo.lm.binding import Binding
from modpo.records import Call
from modpo.store import AdapterFile, Store, hash_folder
from modpo.train.checkpoint import write_folder
from modpo.train.trainer import Trainer


class Watch(Protocol):
    """Is told how a run goes."""

    def advance(self, phase: str, units: int = 1) -> None:
        """Some units (rollouts, traces) of a phase ("before", "warm", "train", "evaluate") are done."""

    def show(self, **numbers: float) -> None:
        """The newest numbers of the run."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """All that a run is made of.

    Attributes:
        program: the student, with its predictors' paths stamped; never changed.
        binding: its trained modules.
        metric: see `Task.metric`.
        settings: how to sample, credit and train.
        recipe: the recipe that the settings name.
        trainset: examples to train on.
        valset: examples for choosing the best version; none means the last version is taken.
        testset: examples for the scores before, after the warm start and at the end; none means `valset`.
        traces: replayed calls per trained module, for the warm start.
        store: where everything is recorded.
        watch: is told how it goes.
        ledger: tokens, money and time, within the budget.
    """

    program: Any
    binding: Binding
    metric: Any
    settings: Settings
    recipe: Recipe
    trainset: Sequence[Any]
    valset: Sequence[Any]
    testset: Sequence[Any]
    traces: Mapping[str, Sequence[Call]]
    store: Store
    watch: Watch
    ledger: Ledger

    @property
    def heldout(self) -> Sequence[Any]:
        """The examples whose scores are reported."""
        return self.testset or self.valset


@dataclass(slots=True)
class State:
    """What changes from step to step; made anew from the store when a run continues."""

    trainer: Trainer
    versions: dict[str, int]
    step: int = 0
    cursor: int = 0
    metric_errors: int = 0
    step_s: float = 0.0  # the longest step of this sitting
    files: dict[str, AdapterFile] = field(default_factory=dict)


def restore(x: Experiment) -> State:
    """Load trainer, versions and position from the store; steps that were not finished are forgotten."""
    names = x.binding.names
    trainer = x.binding.policy.trainer(names, x.settings.seed)
    trainer.pack_tokens = x.settings.pack_tokens
    trainer.checkpoint_activations(x.settings.activation_checkpointing)
    state = State(trainer, dict.fromkeys(names, 0))
    for name, folder in x.binding.starts.items():
        trainer.load(name, folder)
        trainer.reset_moments(name)
    warm, done = x.store.last_done_step("warm"), x.store.last_done_step("train")
    for file in x.store.latest_adapters():
        x.store.verify(file)
        trainer.load(file.name, file.folder)
        state.versions[file.name], state.files[file.name] = file.version, file
    if warm is None and done is None and x.binding.starts:
        publish(x, state, x.binding.names)  # weights from an earlier run become this run's first versions
    if done is not None:
        state.step = done + 1
        past = x.store.steps("train")
        state.cursor = int(past[done].metrics["cursor"])
        state.metric_errors = int(past[done].metrics["metric_errors"])
    x.store.discard_after(state.step, "train")  # keeps what was sampled for the step at hand
    return state


def publish(x: Experiment, state: State, names: Sequence[str]) -> None:
    """Save adapters as new versions; a version is on disk before anything says that it exists."""
    for name in names:
        version = state.versions[name] + 1
        folder = x.store.adapter_folder(name, version)
        write_folder(folder, lambda work, name=name: state.trainer.save(name, x.binding.policy.base, work))  # type: ignore[misc]
        state.versions[name] = version
        state.files[name] = AdapterFile(name, version, folder, hash_folder(folder))


def prune(x: Experiment, state: State) -> None:
    """Delete versions that nothing needs: not the newest two, not one that a validation has measured, none in use."""
    ahead = x.settings.max_staleness or 0
    measured = {(name, version) for made in x.store.validations() for name, version in made.adapters.items()}
    for name, newest in state.versions.items():
        for folder in x.store.adapter_folder(name, 0).parent.glob("v*"):
            version = int(folder.name[1:])
            if version < newest - 1 - ahead and (name, version) not in measured:
                shutil.rmtree(folder, ignore_errors=True)
