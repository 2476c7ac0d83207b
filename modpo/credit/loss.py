"""Losses: per-token terms and their weighted sum. The one place in `credit` that needs torch.

All tensors are flat, one entry per trained token of a pack, [N]. The loss is a plain sum over tokens
of weight times term, so that packs accumulate by addition. Weights come from `aggregation`.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from modpo.credit.recipe import Recipe

MAX_LOG_RATIO = 20.0
MAX_LOG_SEQUENCE_RATIO = 10.0
Stats = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What the loss of one pack needs; all float tensors [N], logprobs in nats.

    Attributes:
        logprobs: under the weights in training; carries the gradient.
        old: under the weights at the start of the step (proximal policy).
        behaviour: as the sampler gave them.
        advantages: of each token's row.
        weights: share of each token in the loss.
        rows: long [N], which row (call) each token belongs to; any distinct numbers. The sequence-level
            loss (GSPO) needs all tokens of a row in the same pack.
        reference: under the adapter-free base; None when the recipe has no KL term.
    """

    logprobs: Tensor
    old: Tensor
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    rows: Tensor
    reference: Tensor | None = None


def loss(recipe: Recipe, inputs: LossInputs) -> tuple[Tensor, Stats]:
    """The loss of one pack and its statistics.

    Returns: the scalar sum(weights * term), and these numbers, which `add_stats` joins over packs:
        `tokens` count; `clipped` tokens whose policy gradient the clip stopped or changed; `truncated` tokens
        whose importance weight met the cap; `mismatch_k3` sum over tokens of the k3 estimate of
        KL(sampler | trainer) in nats; `kl` sum over tokens of the k3 estimate of KL(policy | base) in nats;
        `ratio_max` largest policy ratio.
    """
    terms, ratio, clipped = _policy_terms(recipe, inputs)
    stats = {
        "tokens": float(inputs.logprobs.numel()),
        "clipped": float(clipped.sum()),
        "mismatch_k3": float(k3(inputs.behaviour, inputs.old).sum()),
        "ratio_max": float(ratio.max()) if ratio.numel() else 0.0,
    }
    if recipe.tis_cap is not None:
        importance = truncated_importance(inputs.old, inputs.behaviour, recipe.tis_cap)
        terms = terms * importance
        stats["truncated"] = float((importance >= recipe.tis_cap).sum())
    if recipe.kl is not None:
        assert inputs.reference is not None
        divergence = k3(inputs.logprobs, inputs.reference)
        terms = terms + recipe.kl * divergence
        stats["kl"] = float(divergence.detach().sum())
    return (inputs.weights * terms).sum(), stats


def add_stats(parts: Iterable[Stats]) -> Stats:
    """Join the statistics of packs: names that end in `_max` by maximum, all others by sum."""
    total: Stats = {}
    for part in parts:
        for name, value in part.items():
            join = max if name.endswith("_max") else operator.add
            total[name] = join(total[name], value) if name in total else value
    return total


def token_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """[N] rho_t = exp(lp - lp_old), the log-ratio clamped to [-20, 20]."""
    return (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_ratio(logprobs: Tensor, old: Tensor, rows: Tensor) -> Tensor:
    """[N] s_i = exp(mean over row i of (lp - lp_old)) for each of the row's tokens.

    Its value is the row's; its gradient is s_i times that of the token's own logprob, so that the mean over
    the row's tokens has the gradient of s_i. The log is capped at 10.
    Source: GSPO, arXiv 2507.18071, equations 7 and 14 (GSPO-token) [C].
    """
    row, count = torch.unique(rows, return_inverse=True, return_counts=True)[1:]
    total = torch.zeros_like(count, dtype=logprobs.dtype).index_add(0, row, (logprobs - old).detach())
    log_ratio: Tensor = (total / count)[row] + logprobs - logprobs.detach()
    return log_ratio.clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()


def ppo_clip(
    ratio: Tensor, advantages: Tensor, low: float, high: float, bound: float | None = None
) -> tuple[Tensor, Tensor]:
    """[N] -min(min(ratio, bound) A, clip(ratio, 1 - low, 1 + high) A), and which tokens the clip stopped.

    Source: PPO, arXiv 1707.06347, equation 7; asymmetric as DAPO, arXiv 2503.14476 [C]; bounded on both sides as
    INTELLECT-2, arXiv 2505.07291 (`delta` in TRL) [C].
    """
    clipped = ratio.clamp(1 - low, 1 + high)
    bounded = ratio if bound is None else ratio.clamp(max=bound)
    terms = -torch.minimum(bounded * advantages, clipped * advantages)
    stopped = ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))
    if bound is not None:
        stopped |= (ratio > bound) & (advantages < 0)
    return terms, stopped


def cispo(ratio: Tensor, logprobs: Tensor, advantages: Tensor, high: float) -> tuple[Tensor, Tensor]:
    """[N] -sg(clip(ratio, 0, 1 + high)) A lp, and which tokens the clip changed; no token loses its gradient.

    Source: CISPO of MiniMax-M1, arXiv 2506.13585, equations 4 and 5 [C].
    """
    return -ratio.detach().clamp(max=1 + high) * advantages * logprobs, ratio > 1 + high


def truncated_importance(old: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    """[N] sg(min(exp(lp_old - lp_beh), cap)): corrects for a sampler that is not quite the trainer.

    Source: truncated importance sampling as in verl (`tis_imp_ratio_cap`) [C].
    """
    return token_ratio(old, behaviour).detach().clamp(max=cap)


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """[N] exp(d) - d - 1 with d = other - logprobs, clamped to [-20, 20]: estimates KL(policy | other), never negative.

    Unbiased for tokens that were drawn from `logprobs`.
    Source: Schulman 2020, joschu.net/blog/kl-approx.html, as used by GRPO, arXiv 2402.03300, equation 4 [C].
    """
    d = (other - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return d.exp() - d - 1


def _policy_terms(recipe: Recipe, inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
    """The policy term of each token, its ratio without gradient, and whether the clip acted: three [N]."""
    clip = recipe.clip_low, recipe.clip_high, recipe.clip_bound
    match recipe.loss:
        case "ppo":
            ratio = token_ratio(inputs.logprobs, inputs.old)
            terms, clipped = ppo_clip(ratio, inputs.advantages, *clip)
        case "gspo":
            ratio = sequence_ratio(inputs.logprobs, inputs.old, inputs.rows)
            terms, clipped = ppo_clip(ratio, inputs.advantages, *clip)
        case "cispo":
            ratio = token_ratio(inputs.logprobs, inputs.old)
            terms, clipped = cispo(ratio, inputs.logprobs, inputs.advantages, recipe.clip_high)
        case _:
            assert_never(recipe.loss)
    return terms, ratio.detach(), clipped
