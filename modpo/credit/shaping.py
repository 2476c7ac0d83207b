"""Shaping: changes to rewards that are made before they are compared."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from pydantic import Field, model_validator

from modpo.config import Frozen
from modpo.records import Group, Rollout


class Overlong(Frozen):
    """DAPO's soft punishment of long completions: 0 up to `max_tokens - buffer_tokens`, then falling to `-penalty`.

    Source: DAPO, arXiv 2503.14476, equation 13 [C]; the default lengths are the paper's.
    """

    max_tokens: int = Field(default=20480, ge=1)
    buffer_tokens: int = Field(default=4096, ge=1)
    penalty: float = Field(default=1.0, gt=0, description="reward taken at max_tokens and beyond")

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(f"buffer_tokens must be at most max_tokens ({self.max_tokens})")
        return self

    def punishment(self, tokens: int) -> float:
        """The punishment (-penalty .. 0) of a completion of that many tokens."""
        over = (tokens - (self.max_tokens - self.buffer_tokens)) / self.buffer_tokens
        return -self.penalty * min(max(over, 0.0), 1.0)


def punish_overlong(group: Group, rollouts: Sequence[Rollout], rule: Overlong) -> Group:
    """Add the rule's punishment to the group's rewards; calls that share a reward are judged by the longest."""
    owners = group.owners or range(len(group.members))
    punishments = [0.0] * len(group.rewards)
    for member, owner in zip(group.members, owners, strict=True):
        tokens = len(rollouts[member.rollout].calls[member.call].completion_ids)
        punishments[owner] = min(punishments[owner], rule.punishment(tokens))
    return replace(group, rewards=tuple(r + p for r, p in zip(group.rewards, punishments, strict=True)))
