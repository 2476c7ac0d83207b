"""Builders of small rollouts for the tests of `modpo.credit`."""

from collections.abc import Sequence

from modpo.records import Call, Group, Rollout


def call(module: str, occurrence: int = 0, tokens: int = 2, adapter: str | None = "lora") -> Call:
    ids = tuple(range(tokens))
    return Call(module=module, occurrence=occurrence, model="m", adapter=adapter, completion_ids=ids)


def rollout(reward: float, *modules: str | Call, example: int = 0, sample: int = 0) -> Rollout:
    """A rollout of one example; occurrences are counted from the names."""
    calls: list[Call] = []
    for module in modules:
        if isinstance(module, str):
            module = call(module, sum(earlier.module == module for earlier in calls))
        calls.append(module)
    return Rollout(step=0, example=example, sample=sample, calls=tuple(calls), reward=reward)


def places(group: Group) -> list[tuple[int, int]]:
    """The members as (rollout, call)."""
    return [(member.rollout, member.call) for member in group.members]


def earned(rewards: Sequence[float], owners: Sequence[int]) -> list[float]:
    return [rewards[owner] for owner in owners]
