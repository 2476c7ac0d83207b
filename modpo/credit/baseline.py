"""Baselines: from the rewards of a group to advantages."""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, assert_never

from modpo.errors import MetricError
from modpo.records import NO_SPREAD

BaselineName = Literal["grpo", "dr_grpo", "rloo"]
EPS = 1e-6  # added to the standard deviation; TRL takes 1e-4, the Dr. GRPO code 1e-8


def advantages(
    rewards: Sequence[float],
    baseline: BaselineName = "grpo",
    *,
    ddof: int = 1,
    singleton: Literal["zero", "raw"] = "zero",
) -> list[float]:
    """Advantages of one group, whatever its size and spread.

    Args:
        rewards: [G] finite rewards.
        baseline: which formula to apply.
        ddof: degrees of freedom taken from the standard deviation (0 or 1); used by `grpo` only.
        singleton: what a group of one gets: 0, or its raw reward (as verl does).

    Returns: [G] advantages; all 0 when the rewards do not differ.
    Raises: MetricError when a reward is None, NaN or infinite.
    """
    require_finite(rewards, "a group")
    if len(rewards) == 1 and singleton == "raw":
        return list(rewards)
    if len(rewards) < 2 or max(rewards) - min(rewards) < NO_SPREAD:
        return [0.0] * len(rewards)
    match baseline:
        case "grpo":
            return grpo(rewards, ddof)
        case "dr_grpo":
            return dr_grpo(rewards)
        case "rloo":
            return rloo(rewards)
        case _:
            assert_never(baseline)


def grpo(rewards: Sequence[float], ddof: int = 1) -> list[float]:
    """(r - mean) / (sd + 1e-6) of two or more rewards; ddof 1 as verl and TRL, 0 as HGPO.

    Source: GRPO, arXiv 2402.03300, section 4.1.2 [C].
    """
    centred = dr_grpo(rewards)
    sd = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - ddof))
    return [c / (sd + EPS) for c in centred]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """r - mean, which does not favour easy or hard examples.

    Source: Dr. GRPO, arXiv 2503.20783 [C].
    """
    # fsum is exact, so that the order of the rollouts changes no bit.
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """r - mean of the others = G / (G - 1) * (r - mean) of two or more rewards.

    Source: RLOO, arXiv 2402.14740 [C].
    """
    scale = len(rewards) / (len(rewards) - 1)
    return [scale * c for c in dr_grpo(rewards)]


def require_finite(rewards: Iterable[float | None], where: str) -> None:
    """Refuse rewards that are not finite numbers, naming where they came from."""
    for reward in rewards:
        if reward is None or not math.isfinite(reward):
            raise MetricError(f"{where}: the reward is {reward}; the metric must return a finite number")
