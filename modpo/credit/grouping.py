"""Groupings: which calls may be compared with one another.

A grouping takes the rollouts of a step and the paths of the trained modules. Only calls with sampled
tokens of those modules become members. Groups are ragged: a module called 0, 1 or 7 times is neither
padded nor cut. A group's rewards are those of the compared rollouts; `Group.owners` says which of them
each member earned.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Literal

from modpo.records import NO_SPREAD, Call, Group, Member, Rollout

GroupingName = Literal["mmgrpo", "module", "flow"]
Grouping = Callable[[Sequence[Rollout], Collection[str]], list[Group]]
Key = tuple[str | int, ...]


def mmgrpo(rollouts: Sequence[Rollout], modules: Collection[str]) -> list[Group]:
    """Group by (example, module, k-th invocation): the k-th calls of one module are compared.

    Source: mmGRPO, arXiv 2508.04660 [P abstract, C]; ragged counts stay ragged.
    """
    found = _members(rollouts, modules, lambda rollout, call: (rollout.example, call.module, call.occurrence))
    return [_group(key, members, _rollouts_of(members), rollouts) for key, members in found.items()]


def module(rollouts: Sequence[Rollout], modules: Collection[str]) -> list[Group]:
    """Group by (example, module): all calls of one module, whichever turn they were made in.

    Compared are the rollouts that called the module; `per_call` makes every call count (Dr. MAS).
    Source: Dr. MAS, arXiv 2602.08847 [C].
    """
    found = _members(rollouts, modules, lambda rollout, call: (rollout.example, call.module))
    return [_group(key, members, _rollouts_of(members), rollouts) for key, members in found.items()]


def flow(rollouts: Sequence[Rollout], modules: Collection[str]) -> list[Group]:
    """Group by example: whole trajectories are compared, and every call gets its trajectory's advantage.

    A rollout that made no trainable call is compared too.
    Source: Flow-GRPO of AgentFlow, arXiv 2510.05592 [P+C].
    """
    found = _members(rollouts, modules, lambda rollout, _call: (rollout.example,))
    trajectories: dict[int, list[int]] = {}
    for index, rollout in enumerate(rollouts):
        trajectories.setdefault(rollout.example, []).append(index)
    return [_group((e,), found[(e,)], indices, rollouts) for e, indices in trajectories.items() if (e,) in found]


GROUPINGS: dict[GroupingName, Grouping] = {"mmgrpo": mmgrpo, "module": module, "flow": flow}


def per_call(group: Group) -> Group:
    """Compare calls in place of rollouts: a rollout counts once for each of its calls in the group."""
    owners = group.owners or range(len(group.members))
    rewards = tuple(group.rewards[owner] for owner in owners)
    return replace(group, rewards=rewards, owners=tuple(range(len(rewards))))


def examples_with_spread(rollouts: Iterable[Rollout]) -> list[int]:
    """The examples whose rollouts differ in reward, in order of appearance; the others teach nothing.

    DAPO's dynamic sampling (arXiv 2503.14476, section 3.2 [C]) keeps these and draws new examples for the rest.
    """
    rewards_of: dict[int, list[float]] = {}
    for rollout in rollouts:
        rewards_of.setdefault(rollout.example, []).append(rollout.reward)
    return [example for example, rewards in rewards_of.items() if max(rewards) - min(rewards) >= NO_SPREAD]


def _members(
    rollouts: Sequence[Rollout], modules: Collection[str], key: Callable[[Rollout, Call], Key]
) -> dict[Key, list[Member]]:
    """Collect the trainable calls of `modules` under their keys, in order of appearance."""
    found: dict[Key, list[Member]] = {}
    for r, rollout in enumerate(rollouts):
        for c, call in enumerate(rollout.calls):
            if call.trainable and call.module in modules:
                found.setdefault(key(rollout, call), []).append(Member(r, c))
    return found


def _rollouts_of(members: Sequence[Member]) -> list[int]:
    return list(dict.fromkeys(member.rollout for member in members))


def _group(key: Key, members: Sequence[Member], compared: Sequence[int], rollouts: Sequence[Rollout]) -> Group:
    place = {index: position for position, index in enumerate(compared)}
    return Group(
        key=key,
        members=tuple(members),
        rewards=tuple(rollouts[index].reward for index in compared),
        owners=tuple(place[member.rollout] for member in members),
    )
