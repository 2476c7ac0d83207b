"""The sampler protocol: token ids go in, sampled ids and logprobs come out.

A sampler needs one method, `sample`. The rest has defaults that do nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from modpo.records import Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One completion to sample.

    Attributes:
        key: orders the requests of a batch in deterministic mode; any tuple of comparable values.
        rollout: names the rollout that asks; empty for calls outside of rollouts.
        prompt_ids: token ids of the prompt.
        adapter: name of the adapter to sample from; None for the base model.
        version: version of that adapter.
        folder: where that version is kept, in PEFT's form; None for the base model. The folder says
            which weights answer: two runs may both have a ``planner@v1``.
        max_tokens: most tokens to sample.
        temperature: 0 for greedy.
        seed: seed of this request's own generator (0 .. 2**63-1).
        stop: texts that end the completion when they appear in it; the text stays in the completion.
    """

    key: tuple[int | str, ...] = ()
    rollout: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...]
    adapter: str | None = None
    version: int | None = None
    folder: Path | None = None
    max_tokens: int = 256
    temperature: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled: ids (eos included when sampled), their logprobs in nats, and why it ended."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    text: str


class Sampler(ABC):
    """Makes tokens. Thread-safe: many rollouts call `sample` at once and each call blocks."""

    name: ClassVar[str] = "custom"

    @abstractmethod
    def sample(self, request: SampleRequest) -> Completion:
        """Sample one completion; raises `SamplerError` when the infrastructure is broken."""

    def open(self, folder: Path | None = None, tell: Callable[[str], None] = lambda _: None) -> None:
        """Get ready to sample; a server's log goes into `folder`, and `tell` hears what is waited for."""

    def prepare(self, folders: Mapping[str, Path]) -> None:
        """Expect requests for these versions of adapters (``planner@v17``), kept in these folders."""

    def render(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...] | None:
        """Token ids that it would itself make of chat messages; None where it has no template of its own."""
        return None

    def enter_rollout(self) -> None:
        """A rollout starts: batches may wait for its next request."""

    def leave_rollout(self) -> None:
        """A rollout has ended, or its thread was given up."""

    def close(self) -> None:
        """Release what the sampler holds."""
