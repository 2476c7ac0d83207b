"""Recipes: named compositions of grouping, baseline, shaping, aggregation and loss.

A recipe's `source` has tags: C checked in an official or widely used implementation, P checked in the paper's text,
T from third-party code or notes, M from memory of the paper, A reconstructed from its abstract. Every recipe here
differs from its source in one thing that `tis_cap` states and that None takes back: importance weights against the
sampler's logprobs, truncated at 2.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from modpo.config import Frozen
from modpo.credit.aggregation import AggregationName
from modpo.credit.baseline import BaselineName, advantages, require_finite
from modpo.credit.grouping import GROUPINGS, per_call
from modpo.credit.shaping import Overlong, punish_overlong
from modpo.credit.turns import by_advantage, by_state, by_turn, turns_of
from modpo.errors import ConfigError, nearest
from modpo.records import Call, Credited, Group, Member, Rollout

LossName = Literal["ppo", "gspo", "cispo"]


class Recipe(Frozen):
    """How rewards become a loss. None always means off."""

    name: str
    summary: str
    source: str
    grouping: Literal["mmgrpo", "module", "flow", "turn", "turn_advantage"] = Field(
        default="mmgrpo", description="which calls are compared"
    )
    turn_opener: str | None = Field(
        default=None, description="module whose calls open turns; None: the one that a rollout called first"
    )
    discount: float = Field(default=1.0, gt=0, le=1, description="of what a turn's later turns earned, a turn")
    trace: float = Field(default=1.0, gt=0, le=1, description="of a turn's later surprises, a turn (GAE's lambda)")
    state_weight: float | None = Field(
        default=None, gt=0, description="weight of the advantage over turns from the same state, which is added"
    )
    normalise_over: Literal["trajectories", "calls"] = Field(
        default="trajectories", description="what counts once in a group's statistics: a rollout, or each of its calls"
    )
    baseline: BaselineName = Field(default="grpo", description="how a group's rewards become advantages")
    ddof: Literal[0, 1] = Field(default=1, description="degrees of freedom taken from the standard deviation")
    singleton: Literal["zero", "raw"] = Field(default="zero", description="advantage of a group of one")
    shaping: Overlong | None = Field(default=None, description="punishment of long completions")
    drop_silent: bool = Field(default=False, description="take groups without spread out of the loss's means")
    max_draws: int = Field(
        default=1,
        ge=1,
        description="batches drawn at most to fill a step with examples that have spread (dynamic sampling)",
    )
    aggregation: AggregationName = Field(default="seq_mean_token_mean", description="how tokens are averaged")
    loss: LossName = Field(default="ppo", description="loss of a token")
    clip_low: float = Field(
        default=0.2, ge=0, le=1, description="the ratio is clipped below 1 - clip_low (not by cispo)"
    )
    clip_high: float = Field(default=0.2, ge=0, description="the ratio is clipped above 1 + clip_high")
    clip_bound: float | None = Field(
        default=None, gt=1, description="bound of the ratio also where the advantage is negative (two-sided clip)"
    )
    kl: float | None = Field(default=None, gt=0, description="strength of the k3 KL to the base model without adapters")
    tis_cap: float | None = Field(default=2.0, gt=0, description="cap of the importance weights against the sampler")

    @property
    def by_turns(self) -> bool:
        """Whether credit is by turn, so that what the metric says of turns is used."""
        return self.state_weight is not None or self.grouping in ("turn", "turn_advantage")


_MMGRPO = Recipe(
    name="mmgrpo",
    summary="GRPO over the k-th calls of one module on one example; every call gets the program's score.",
    source="mmGRPO, arXiv 2508.04660 [P abstract, C]; GRPO, arXiv 2402.03300 [C]",
)


def _variant(name: str, summary: str, source: str, **changes: Any) -> Recipe:
    return Recipe.of(**{**_MMGRPO.model_dump(), **changes, "name": name, "summary": summary, "source": source})


_RECIPES = {
    made.name: made
    for made in (
        _MMGRPO,
        _variant(
            "flow_grpo",
            "One trajectory reward, compared over an example's trajectories, goes to every call.",
            "Flow-GRPO of AgentFlow, arXiv 2510.05592 [P+C]; normalise_over='calls' does as its public code, "
            "where long trajectories weigh more",
            grouping="flow",
            aggregation="trajectory",
        ),
        _variant(
            "gtpo",
            "A turn's discounted return, compared over an example's turns of the same index.",
            "GTPO, arXiv 2511.14846 [A]: the turn level, discount 0.9; all else as flow_grpo",
            grouping="turn",
            discount=0.9,
            aggregation="trajectory",
        ),
        _variant(
            "gigpo",
            "The trajectory's advantage, plus the turn's over turns that started from the same state.",
            "GiGPO, arXiv 2505.10978 [T]: weight 1, discount 0.95; baseline='dr_grpo' is its F = 1",
            grouping="flow",
            state_weight=1.0,
            discount=0.95,
        ),
        _variant(
            "gagpo",
            "A turn's generalised advantage over the mean return of its state, normalised over the example's turns.",
            "GAGPO, arXiv 2605.13217 [T]: discount and trace 0.95; its ratio of an action is GSPO's of a call",
            grouping="turn_advantage",
            discount=0.95,
            trace=0.95,
            loss="gspo",
        ),
        _variant(
            "dr_mas",
            "Mean and deviation per module over all its calls on an example.",
            "Dr. MAS, arXiv 2602.08847 [C]",
            grouping="module",
            normalise_over="calls",
        ),
        _variant(
            "mmgrpo_dr",
            "mmGRPO without division by the deviation or by the completion's length.",
            "Dr. GRPO, arXiv 2503.20783 [C], on the groups of mmGRPO",
            baseline="dr_grpo",
            aggregation="const",
        ),
        _variant(
            "mmgrpo_rloo",
            "mmGRPO with the mean of the other rollouts as baseline.",
            "RLOO, arXiv 2402.14740 [C], on the groups of mmGRPO",
            baseline="rloo",
        ),
        _variant(
            "dapo",
            "Higher upper clip, mean over tokens, long completions punished, examples without spread drawn again.",
            "DAPO, arXiv 2503.14476 [C], on the groups of mmGRPO",
            clip_high=0.28,
            aggregation="token_mean",
            shaping=Overlong(),
            drop_silent=True,
            max_draws=10,
        ),
        _variant(
            "gspo",
            "One ratio per completion, the geometric mean of its tokens' ratios.",
            "GSPO, arXiv 2507.18071 [C], on the groups of mmGRPO",
            loss="gspo",
            clip_low=3e-4,
            clip_high=4e-4,
        ),
        _variant(
            "cispo",
            "The importance weight is clipped, not the gradient: every token learns.",
            "CISPO of MiniMax-M1, arXiv 2506.13585 [C], on the groups of mmGRPO; the paper gives no clip_high, "
            "4 is an upper bound of 5 as in ScaleRL [M]",
            loss="cispo",
            clip_high=4.0,
            aggregation="token_mean",
        ),
    )
}


def recipes() -> dict[str, Recipe]:
    """All recipes by name."""
    return dict(_RECIPES)


def recipe(name: str, /, **options: Any) -> Recipe:
    """The recipe of that name with some of its fields changed.

    Raises: ConfigError when there is no such recipe or option, naming the nearest, or a value is not allowed.
    """
    if name not in _RECIPES:
        raise ConfigError(f"unknown recipe {name!r}; {nearest(name, _RECIPES)}")
    allowed = Recipe.model_fields.keys() - {"name", "summary", "source"}
    for option in options:
        if option not in allowed:
            raise ConfigError(f"unknown option {option!r} for recipe {name!r}; {nearest(option, allowed)}")
    return Recipe.of(**{**_RECIPES[name].model_dump(), **options})


@dataclass(frozen=True, slots=True)
class Assignment:
    """The advantages of a step.

    Attributes:
        credited: the calls that take part in the loss, also those with advantage 0; their shares of it
            are `token_weights`'s to give, once the step is cut into updates.
        groups: what was compared, with the rewards as they were compared.
        silent: how many groups had no spread.
        left_out: why calls take no part (`frozen`, `not trained`, `no tokens`, `silent group`) and how many.
    """

    credited: tuple[Credited, ...]
    groups: tuple[Group, ...]
    silent: int
    left_out: dict[str, int]


def assign(
    recipe: Recipe,
    rollouts: Sequence[Rollout],
    modules: Collection[str],
    too_old: Callable[[Call], bool] | None = None,
) -> Assignment:
    """Give every trainable call of `modules` its advantage.

    Args:
        rollouts: all rollouts of a step, failed ones included.
        modules: paths of the trained modules.
        too_old: whether a call's adapter version is out of date; a group with one such call is left out whole.

    Raises: MetricError naming the example when a reward is not a finite number.
    """
    for rollout in rollouts:
        require_finite([rollout.reward], f"example {rollout.example}, rollout {rollout.sample}")
    left_out = Counter(
        why for rollout in rollouts for call in rollout.calls if (why := _why_left_out(call, modules)) is not None
    )
    compared, by_states = _compared(recipe, rollouts, modules), _by_states(recipe, rollouts, modules)
    weights = [1.0] * len(compared) + [recipe.state_weight or 0.0] * len(by_states)
    groups = [_shape(recipe, group, rollouts) for group in (*compared, *by_states)]
    earned: dict[Member, float] = {}
    silent: dict[Member, bool] = {}
    stale: set[Member] = set()
    for group, weight in zip(groups, weights, strict=True):
        given = _credit(recipe, group)
        if too_old is not None and any(too_old(rollouts[one.rollout].calls[one.call]) for one in group.members):
            stale.update(group.members)
        teaches = any(one.advantage for one in given)
        for one in given:
            earned[one.member] = earned.get(one.member, 0.0) + weight * one.advantage
            silent[one.member] = silent.get(one.member, True) and not teaches
    credited = []
    for member, advantage in earned.items():
        if member in stale:
            left_out["stale group"] += 1
        elif recipe.drop_silent and silent[member]:
            left_out["silent group"] += 1
        else:
            credited.append(Credited(member, advantage))
    return Assignment(tuple(credited), tuple(groups), sum(group.silent for group in groups), dict(left_out))


def _compared(recipe: Recipe, rollouts: Sequence[Rollout], modules: Collection[str]) -> list[Group]:
    """The groups of a recipe's grouping; each trainable call lies in one."""
    match recipe.grouping:
        case "turn":
            return by_turn(turns_of(rollouts, modules, recipe.turn_opener), recipe.discount)
        case "turn_advantage":
            return by_advantage(turns_of(rollouts, modules, recipe.turn_opener), recipe.discount, recipe.trace)
        case named:
            return GROUPINGS[named](rollouts, modules)


def _by_states(recipe: Recipe, rollouts: Sequence[Rollout], modules: Collection[str]) -> list[Group]:
    """The groups of turns from the same state, where the recipe adds their advantage."""
    if recipe.state_weight is None:
        return []
    return by_state(turns_of(rollouts, modules, recipe.turn_opener), recipe.discount)


def _why_left_out(call: Call, modules: Collection[str]) -> str | None:
    if call.adapter is None:
        return "frozen"
    if call.module not in modules:
        return "not trained"
    return None if call.completion_ids else "no tokens"


def _shape(recipe: Recipe, group: Group, rollouts: Sequence[Rollout]) -> Group:
    if recipe.normalise_over == "calls":
        group = per_call(group)
    return punish_overlong(group, rollouts, recipe.shaping) if recipe.shaping is not None else group


def _credit(recipe: Recipe, group: Group) -> list[Credited]:
    earned = advantages(group.rewards, recipe.baseline, ddof=recipe.ddof, singleton=recipe.singleton)
    owners = group.owners or range(len(group.members))
    return [Credited(member, earned[owner]) for member, owner in zip(group.members, owners, strict=True)]
