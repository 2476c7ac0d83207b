"""Which modules of a program answer with which adapter, and copies of a program bound to given versions."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dspy

from modpo.errors import PolicyError, nearest
from modpo.lm.policy import Policy
from modpo.lm.policy_lm import PolicyLM
from modpo.lm.recorder import stamp_paths
from modpo.lm.versions import find_version


@dataclass(frozen=True, slots=True)
class Binding:
    """The trained part of a program.

    Attributes:
        policy: the one policy that its trained modules answer from.
        adapters: adapter name by path of each trained module.
        starts: folder of the version an adapter starts from, where the program was trained before.
        max_tokens: most tokens that a trained module may answer with.
    """

    policy: Policy
    adapters: dict[str, str]
    starts: dict[str, Path]
    max_tokens: int

    @property
    def names(self) -> tuple[str, ...]:
        """The distinct adapter names, sorted."""
        return tuple(sorted(set(self.adapters.values())))


def bind(program: dspy.Module) -> Binding:
    """Find the modules of a program that a policy answers and adapters may change.

    Raises:
        PolicyError: there is none, they belong to different policies, or modules that share an adapter
            start from different versions of it.
    """
    lms = {path: lm for path, lm in _lms(program).items() if isinstance(lm, PolicyLM)}
    if not lms:
        raise PolicyError(
            "no module of the program answers from a policy, so there is nothing to train; "
            "give it one: program.set_lm(modpo.Policy('smollm2-135m').lm())"
        )
    policies = {id(lm.policy): lm.policy for lm in lms.values()}
    if len(policies) > 1:
        raise PolicyError(f"the program's modules answer from {len(policies)} policies; give all of them the same one")
    (policy,) = policies.values()
    assert isinstance(policy, Policy)
    _check_mapping(policy, lms)
    adapters: dict[str, str] = {}
    starts: dict[str, Path] = {}
    for path, lm in lms.items():
        name = lm.adapter or policy.adapter_for(path)
        if name is None:
            continue
        folder = find_version(lm.engine.run, lm.adapter, lm.version)
        if name in adapters.values() and starts.get(name) != folder:
            raise PolicyError(f"the modules that share adapter {name!r} start from different versions of it")
        adapters[path] = name
        if folder is not None:
            starts[name] = folder
    if not adapters:
        raise PolicyError("the policy's adapters mapping names none of the program's modules; add one of them to it")
    return Binding(policy, adapters, starts, max(lms[path].kwargs["max_tokens"] for path in adapters))


def _check_mapping(policy: Policy, lms: Mapping[str, Any]) -> None:
    for path in policy.adapters if isinstance(policy.adapters, dict) else ():
        if path not in lms:
            raise PolicyError(f"adapters names the module {path!r}; {nearest(path, lms)}")


def _lms(program: dspy.Module) -> dict[str, Any]:
    return {path: predictor.lm or dspy.settings.lm for path, predictor in stamp_paths(program).items()}


def bound(program: dspy.Module, adapters: Mapping[str, str], versions: Mapping[str, int], run: Path) -> dspy.Module:
    """A copy of a program whose trained modules answer with the given versions of their adapters.

    Args:
        program: stays as it is.
        adapters: adapter name by module path.
        versions: version by adapter name.
        run: the run folder that keeps them.
    """
    copy = program.deepcopy()
    owned = {path: predictor.lm for path, predictor in stamp_paths(program).items()}
    for path, predictor in stamp_paths(copy).items():
        predictor.lm = owned[path]  # frozen LMs are shared, not cloned
        if path in adapters:
            name = adapters[path]
            lm = owned[path] or dspy.settings.lm
            predictor.lm = lm.copy(adapter=name, version=versions[name], run=str(run.resolve()))
    return copy
