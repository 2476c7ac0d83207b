"""Turns: credit within a rollout, where what each turn earned is known, or where it started from.

A turn begins with each call of the module that opens turns: the rollout's first, unless the recipe names one. All
calls up to the next belong to it. The metric may say what each turn earned (`turn_scores`); where it does not, and
for rollouts that failed, the last turn earned the rollout's reward. Turn counts are ragged. The metric may also name
the state that each turn started from (`turn_states`); of a rollout that failed before the metric could, a turn that was
asked the same as a named one started from the same.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from modpo.errors import ConfigError, MetricError
from modpo.records import Call, Group, Member, Rollout

State = str | tuple[int, ...] | None
Told = TypeVar("Told")


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one rollout.

    Attributes:
        example: index of the example.
        index: which turn of its rollout it is.
        reward: what it earned.
        state: what it started from: the metric's `turn_states`, or the prompt ids of its opening call. Where that
            call is a frozen module's, whose prompts are not kept, None; of a rollout that failed, equal to no other.
        members: its trainable calls.
    """

    example: int
    index: int
    reward: float
    state: State
    members: tuple[Member, ...]


def turns_of(rollouts: Sequence[Rollout], modules: Collection[str], opener: str | None = None) -> list[list[Turn]]:
    """The turns of each rollout; none for one that made no call.

    Args:
        rollouts: all rollouts of a step.
        modules: paths of the trained modules.
        opener: path of the module that opens turns; None is the first that a rollout called.

    Raises: MetricError when the metric said something of another number of turns than the rollout has.
    """
    named = {
        (rollout.example, opening.prompt_ids): state
        for rollout in rollouts
        for opening, state in zip(_openings(rollout, opener), rollout.turn_states or (), strict=False)
        if opening.prompt_ids
    }
    return [_split(index, rollout, modules, opener, named) for index, rollout in enumerate(rollouts)]


def returns(rewards: Sequence[float], discount: float) -> list[float]:
    """R_k = r_k + discount * R_(k+1), the discounted sum of what came from turn k on."""
    found: list[float] = []
    for reward in reversed(rewards):
        found.append(reward + discount * (found[-1] if found else 0.0))
    return found[::-1]


def by_turn(turns_G: Sequence[Sequence[Turn]], discount: float) -> list[Group]:
    """Group by (example, k): the returns from the k-th turns on are compared among the rollouts that have one.

    Source: GTPO, arXiv 2511.14846 [A], the turn level: returns with discount 0.9, normalised over turns of equal index.
    """
    found: dict[tuple[str | int, ...], list[tuple[Turn, float]]] = {}
    for turn, value in _with_returns(turns_G, discount):
        found.setdefault((turn.example, "turn", turn.index), []).append((turn, value))
    return _groups(found)


def by_state(turns_G: Sequence[Sequence[Turn]], discount: float) -> list[Group]:
    """Group by equal states of an example: the returns from there on are compared; a state seen once has no group.

    Source: GiGPO's step level, arXiv 2505.10978 [T]: discount 0.95, anchor states matched exactly.
    """
    found: dict[tuple[str | int, ...], list[tuple[Turn, float]]] = {}
    names: dict[tuple[int, State], int] = {}
    for turn, value in _with_returns(turns_G, discount):
        number = names.setdefault((turn.example, _known(turn)), len(names))
        found.setdefault((turn.example, "state", number), []).append((turn, value))
    return _groups({key: turns for key, turns in found.items() if len(turns) > 1})


def by_advantage(turns_G: Sequence[Sequence[Turn]], discount: float, trace: float) -> list[Group]:
    """Group by example: each turn is compared by its generalised advantage over its state's mean return.

    V(s) = mean discounted return over the example's turns of state s, 0 after the last turn;
    delta_k = r_k + discount * V(s_(k+1)) - V(s_k); A_k = delta_k + discount * trace * A_(k+1).
    Source: GAGPO, arXiv 2605.13217 [T]: discount and trace (lambda) 0.95, normalised over the group afterwards.
    """
    seen: dict[tuple[int, State], list[float]] = {}
    for turn, value in _with_returns(turns_G, discount):
        seen.setdefault((turn.example, _known(turn)), []).append(value)
    mean = {state: sum(values) / len(values) for state, values in seen.items()}
    found: dict[tuple[str | int, ...], list[tuple[Turn, float]]] = {}
    for turns in turns_G:
        values = [mean[turn.example, turn.state] for turn in turns] + [0.0]
        deltas = [turn.reward + discount * values[k + 1] - values[k] for k, turn in enumerate(turns)]
        for turn, value in zip(turns, returns(deltas, discount * trace), strict=True):
            found.setdefault((turn.example,), []).append((turn, value))
    return _groups(found)


def spans_of(rollout: Rollout, opener: str | None = None) -> list[list[int]]:
    """The turns of a rollout, each as the indices of its calls in the order they were made."""
    order = sorted(range(len(rollout.calls)), key=lambda at: rollout.calls[at].position)
    if not order:
        return []
    opening = opener or rollout.calls[order[0]].module
    openers = [place for place, at in enumerate(order) if rollout.calls[at].module == opening]
    bounds = [0, *openers[1:], len(order)]  # what comes before the first opener belongs to it
    return [order[start:end] for start, end in pairwise(bounds)]


def fits(rollout: Rollout, opener: str | None = None) -> bool:
    """Whether what the metric said of turns is of as many as the rollout has."""
    turns = len(spans_of(rollout, opener))
    return all(told is None or len(told) == turns for told in (rollout.turn_scores, rollout.turn_states))


def _openings(rollout: Rollout, opener: str | None) -> list[Call]:
    """The call that opens each turn; the turn's first where the opener was never called."""
    spans = spans_of(rollout, opener)
    opening = opener or (rollout.calls[spans[0][0]].module if spans else "")
    turns = [[rollout.calls[at] for at in span] for span in spans]
    return [next((call for call in calls if call.module == opening), calls[0]) for calls in turns]


def _split(
    index: int,
    rollout: Rollout,
    modules: Collection[str],
    opener: str | None,
    named: Mapping[tuple[int, tuple[int, ...]], str],
) -> list[Turn]:
    spans, openings = spans_of(rollout, opener), _openings(rollout, opener)
    rewards = _told(index, rollout, "turn_scores", rollout.turn_scores, len(spans))
    states = _told(index, rollout, "turn_states", rollout.turn_states, len(spans))
    turns = []
    for k, span in enumerate(spans):
        taught = [at for at in span if rollout.calls[at].trainable and rollout.calls[at].module in modules]
        members = tuple(Member(index, at) for at in taught)
        last = rollout.reward if k == len(spans) - 1 else 0.0
        asked = openings[k].prompt_ids
        unlike = (-1, index, k) if rollout.failure else None  # no token has such an id
        state = states[k] if states else named.get((rollout.example, asked), asked) or unlike
        turns.append(Turn(rollout.example, k, rewards[k] if rewards else last, state, members))
    return turns


def _told(index: int, rollout: Rollout, name: str, told: Sequence[Told] | None, turns: int) -> Sequence[Told] | None:
    if told is not None and len(told) != turns:
        raise MetricError(
            f"the metric gave {len(told)} {name} for example {rollout.example} (rollout {index}), which has {turns} "
            "turns: a turn begins with each call of the module that opens turns (recipe option turn_opener)"
        )
    return told


def _known(turn: Turn) -> State:
    if turn.state is None:
        raise ConfigError(
            "turns are compared by the state they started from, but the module that opens them is frozen, and its "
            "prompts are not kept: let the metric return turn_states, or take another recipe"
        )
    return turn.state


def _with_returns(turns_G: Iterable[Sequence[Turn]], discount: float) -> list[tuple[Turn, float]]:
    return [
        pair
        for turns in turns_G
        for pair in zip(turns, returns([turn.reward for turn in turns], discount), strict=True)
    ]


def _groups(found: dict[tuple[str | int, ...], list[tuple[Turn, float]]]) -> list[Group]:
    """One group per key, with a value per turn; a group without a trainable call teaches nothing."""
    groups = []
    for key, turns in found.items():
        members = tuple(member for turn, _ in turns for member in turn.members)
        owners = tuple(owner for owner, (turn, _) in enumerate(turns) for _ in turn.members)
        if members:
            groups.append(Group(key, members, tuple(value for _, value in turns), owners))
    return groups
