"""A compiled run behind a server: start one for its adapters, and let a program answer through one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dspy

from modpo.config import VLLM, LoRA
from modpo.errors import StoreError
from modpo.lm.policy import Policy
from modpo.lm.policy_lm import PolicyLM
from modpo.lm.recorder import stamp_paths
from modpo.lm.versions import serving
from modpo.lm.vllm.sampler import VLLMSampler
from modpo.train.lora import read_config


def connect(program: dspy.Module, url: str) -> dspy.Module:
    """A copy of a program whose policy modules answer through a vLLM server.

    The base's weights are not read here. Each module's version is loaded into the server when it is first asked for.

    Args:
        program: e.g. a saved one, loaded; stays as it is.
        url: of the server; it must see the run folder under the same path.
    """
    copy = program.deepcopy()
    lms = {path: predictor.lm for path, predictor in stamp_paths(program).items()}
    served: dict[int, Policy] = {}
    for path, predictor in stamp_paths(copy).items():
        lm = predictor.lm = lms[path]
        if isinstance(lm, PolicyLM) and isinstance(lm.policy, Policy):
            policy = served.setdefault(id(lm.policy), lm.policy.with_sampler(VLLM.of(url=url)))
            predictor.lm = lm.copy(policy=policy)
    return copy


@dataclass(frozen=True, slots=True)
class Served:
    """A server of ours that holds a run's adapters: its URL, and the name each adapter is served under."""

    sampler: VLLMSampler
    url: str
    models: dict[str, str]

    def wait(self) -> None:
        """Return never; raises a `SamplerError` when the server ends."""
        assert self.sampler.process is not None
        self.sampler.process.wait()


def serve(run: Path, versions: dict[str, int], settings: VLLM, tell: Any = lambda _: None) -> Served:
    """Start a server that holds these versions of a run's adapters.

    Raises:
        StoreError: the run has no trained adapter.
        SamplerError: the server does not start.
    """
    folders = serving(versions, run)
    if not folders:
        raise StoreError(f"the run in {run} has trained no adapter yet; there is nothing to serve")
    base, rank, alpha = read_config(next(iter(folders.values())))
    settings = settings.model_copy(update={"max_loras": max(settings.max_loras, len(folders))})
    policy = Policy(base, lora=LoRA.of(rank=rank, alpha=alpha), sampler=settings)
    sampler = policy.sampler
    assert isinstance(sampler, VLLMSampler)
    sampler.open(run, tell)
    try:
        sampler.prepare(folders)
    except BaseException:
        sampler.close()  # no server is left behind by a call that failed
        raise
    names = dict(zip(folders, sampler.slots.held, strict=True))
    return Served(sampler, sampler.url, names)
