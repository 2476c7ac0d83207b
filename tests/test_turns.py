"""Turn credit, on rollouts with unequal numbers of turns; all numbers are worked out by hand."""

import math
from dataclasses import replace

import pytest

from modpo.credit import assign, recipe, recipes
from modpo.credit.turns import by_advantage, by_state, by_turn, fits, returns, turns_of
from modpo.errors import ConfigError, MetricError
from modpo.records import Rollout
from tests.credit_rollouts import call, earned, places

BOTH = {"plan", "act"}


def sequence(reward: float, *modules: str, sample: int = 0, states: str | None = None, **more: object) -> Rollout:
    """A rollout of example 0 that called its modules in that order; `states` has a letter per turn."""
    calls = [
        replace(call(module, modules[:at].count(module)), position=at, prompt_ids=(at, sample))
        for at, module in enumerate(modules)
    ]
    ordered = tuple(sorted(calls, key=lambda each: (each.module, each.occurrence)))
    more["turn_states"] = None if states is None else tuple(states)
    return Rollout(step=0, example=0, sample=sample, calls=ordered, reward=reward, **more)  # type: ignore[arg-type]


# Right in one turn; right in three, where the second was planned but never acted; wrong in two; died before any call.
RAGGED = [
    sequence(1.0, "plan", "act", states="s"),
    sequence(1.0, "plan", "act", "plan", "plan", "act", sample=1, states="sts"),
    sequence(0.0, "plan", "act", "plan", "act", sample=2, states="st"),
    sequence(0.0, sample=3),
]


def by_place(name: str, rollouts: list[Rollout], **options: object) -> dict[tuple[int, str, int], float]:
    """Advantage by (rollout, module, occurrence)."""
    found = {}
    for one in assign(recipe(name, **options), rollouts, BOTH).credited:
        made = rollouts[one.member.rollout].calls[one.member.call]
        found[one.member.rollout, made.module, made.occurrence] = one.advantage
    return found


def test_a_turn_begins_with_each_call_of_the_first_module() -> None:
    turns = turns_of(RAGGED, BOTH)
    assert [[len(turn.members) for turn in one] for one in turns] == [[2], [2, 1, 2], [2, 2], []]
    assert [[turn.reward for turn in one] for one in turns] == [[1.0], [0.0, 0.0, 1.0], [0.0, 0.0], []]
    # calls lie by module: act 0, act 1, plan 0, plan 1, plan 2
    assert [[(m.rollout, m.call) for m in turn.members] for turn in turns[1]] == [
        [(1, 2), (1, 0)],
        [(1, 3)],
        [(1, 4), (1, 1)],
    ]


def test_the_recipe_may_name_the_module_that_opens_turns() -> None:
    unnamed = [replace(one, turn_states=None) for one in RAGGED]
    turns = turns_of(unnamed, BOTH, opener="act")
    # what comes before the first one belongs to its turn
    assert [[len(turn.members) for turn in one] for one in turns[:3]] == [[2], [4, 1], [3, 1]]
    assert [len(one) for one in turns_of(unnamed[:1], BOTH, opener="never called")] == [1]


def test_a_turn_s_state_is_the_prompt_of_its_opening_call_unless_the_metric_named_it() -> None:
    unnamed = replace(RAGGED[2], turn_states=None)
    assert [turn.state for turn in turns_of([unnamed], BOTH)[0]] == [(0, 2), (2, 2)]
    assert [turn.state for turn in turns_of([RAGGED[2]], BOTH)[0]] == ["s", "t"]


def test_the_metric_s_turn_scores_are_what_turns_earned() -> None:
    told = replace(RAGGED[1], turn_scores=(0.0, 0.5, 2.0))
    assert [turn.reward for turn in turns_of([told], BOTH)[0]] == [0.0, 0.5, 2.0]


def test_scores_of_another_number_of_turns_are_refused() -> None:
    told = replace(RAGGED[1], turn_scores=(0.0, 0.5))
    with pytest.raises(MetricError, match=r"gave 2 turn_scores for example 0 \(rollout 0\), which has 3 turns"):
        turns_of([told], BOTH)


def test_returns_are_discounted_sums_of_what_follows() -> None:
    assert returns([1.0, 2.0, 4.0], 0.5) == [3.0, 4.0, 4.0]
    assert returns([], 0.5) == []


def test_gtpo_compares_the_returns_of_the_kth_turns() -> None:
    groups = {group.key: group for group in by_turn(turns_of(RAGGED, BOTH), 0.9)}
    assert list(groups) == [(0, "turn", 0), (0, "turn", 1), (0, "turn", 2)]
    assert groups[0, "turn", 0].rewards == pytest.approx((1.0, 0.81, 0.0))
    assert groups[0, "turn", 1].rewards == pytest.approx((0.9, 0.0))
    assert groups[0, "turn", 2].rewards == (1.0,)
    assert groups[0, "turn", 0].owners == (0, 0, 1, 1, 2, 2)

    found = by_place("gtpo", RAGGED)
    # 1, 0.81, 0: mean 0.60333, deviations 0.39667, 0.20667, -0.60333, sd (ddof 1) sqrt(0.56407 / 2) = 0.53107
    sd = math.sqrt((0.39667**2 + 0.20667**2 + 0.60333**2) / 2)
    assert found[0, "plan", 0] == found[0, "act", 0] == pytest.approx(0.39667 / sd, rel=1e-4)
    assert found[1, "plan", 0] == pytest.approx(0.20667 / sd, rel=1e-4)
    assert found[2, "act", 0] == pytest.approx(-0.60333 / sd, rel=1e-4)
    # 0.9 against 0: plus and minus 1 / sqrt(2)
    assert found[1, "plan", 1] == pytest.approx(math.sqrt(0.5), rel=1e-4)
    assert found[2, "plan", 1] == pytest.approx(-math.sqrt(0.5), rel=1e-4)
    # a third turn that no other rollout had cannot be compared
    assert found[1, "plan", 2] == found[1, "act", 1] == 0.0


def test_gtpo_without_discount_on_single_turns_is_flow_grpo_over_rollouts_that_called() -> None:
    rollouts = [sequence(reward, "plan", "act", sample=at) for at, reward in enumerate((1.0, 0.0, 0.0))]
    assert by_place("gtpo", rollouts, discount=1.0) == by_place("flow_grpo", rollouts)


def test_states_seen_once_are_not_compared() -> None:
    groups = by_state(turns_of(RAGGED, BOTH), 0.5)
    assert [group.key for group in groups] == [(0, "state", 0), (0, "state", 1)]
    # s: the first turns of all three, and the third of the second; t: the second turns
    assert groups[0].rewards == (1.0, 0.25, 1.0, 0.0)
    assert groups[1].rewards == (0.5, 0.0)
    assert places(groups[1]) == [(1, 3), (2, 3), (2, 1)]
    alone = [sequence(1.0, "plan", states="a"), sequence(0.0, "plan", sample=1, states="b")]
    assert by_state(turns_of(alone, BOTH), 0.5) == []


def test_gigpo_adds_the_state_s_advantage_to_the_trajectory_s() -> None:
    found = by_place("gigpo", RAGGED, discount=0.5, state_weight=2.0, baseline="dr_grpo")
    # trajectories 1, 1, 0, 0: mean 0.5. State s: 1, 0.25, 1, 0, mean 0.5625. State t: 0.5, 0, mean 0.25.
    assert found[0, "plan", 0] == found[0, "act", 0] == pytest.approx(0.5 + 2 * (1 - 0.5625))
    assert found[1, "plan", 0] == pytest.approx(0.5 + 2 * (0.25 - 0.5625))
    assert found[1, "plan", 1] == pytest.approx(0.5 + 2 * 0.25)
    assert found[1, "act", 1] == pytest.approx(0.5 + 2 * (1 - 0.5625))
    assert found[2, "act", 1] == pytest.approx(-0.5 - 2 * 0.25)


def test_gagpo_s_advantages_before_they_are_normalised() -> None:
    (group,) = by_advantage(turns_of(RAGGED, BOTH), 0.5, 0.5)
    # V(s) = mean(1, 0.25, 1, 0) = 0.5625, V(t) = mean(0.5, 0) = 0.25
    # rollout 0: 1 - 0.5625. Rollout 1, last turn: 1 - 0.5625 = 0.4375; second: 0.5 * 0.5625 - 0.25 = 0.03125, and
    # 0.25 * 0.4375 more = 0.140625; first: 0.5 * 0.25 - 0.5625 = -0.4375, and 0.25 * 0.140625 more = -0.40234375.
    # rollout 2, last: -0.25; first: -0.4375 - 0.25 * 0.25 = -0.5
    assert group.rewards == pytest.approx((0.4375, -0.40234375, 0.140625, 0.4375, -0.5, -0.25))
    assert group.owners == (0, 0, 1, 1, 2, 3, 3, 4, 4, 5, 5)


def test_gagpo_normalises_over_the_turns_of_an_example() -> None:
    found = by_place("gagpo", RAGGED, discount=0.5, trace=0.5)
    values = (0.4375, -0.40234375, 0.140625, 0.4375, -0.5, -0.25)
    mean = sum(values) / 6
    sd = math.sqrt(sum((value - mean) ** 2 for value in values) / 5)
    assert found[0, "plan", 0] == pytest.approx((0.4375 - mean) / sd, rel=1e-5)
    assert found[2, "act", 1] == pytest.approx((-0.25 - mean) / sd, rel=1e-5)
    assert recipe("gagpo").loss == "gspo"


def test_a_frozen_opener_has_no_state_to_compare() -> None:
    frozen = replace(call("plan", adapter=None), position=0)
    rollouts = [Rollout(step=0, example=0, sample=at, calls=(frozen,), reward=float(at)) for at in range(2)]
    for name in ("gigpo", "gagpo"):
        with pytest.raises(ConfigError, match="let the metric return turn_states"):
            assign(recipe(name), rollouts, BOTH)
    assert assign(recipe("gtpo"), rollouts, BOTH).credited == ()


def failed(*modules: str, sample: int, **more: object) -> Rollout:
    return sequence(0.0, *modules, sample=sample, failure="parse", **more)


def test_a_failed_rollout_starts_from_the_state_of_the_same_prompt() -> None:
    asked = [
        replace(one, calls=tuple(replace(each, prompt_ids=(each.position,)) for each in one.calls))
        for one in (*RAGGED[:3], failed("plan", "act", "plan", sample=4), failed("act", sample=5))
    ]
    states = [[turn.state for turn in turns] for turns in turns_of(asked, BOTH)]
    assert states[3] == ["s", "t"]  # asked as the first and the second turn of the others
    assert states[4] == ["s"]
    elsewhere = replace(asked[3], example=1)
    assert [turn.state for turn in turns_of([*asked[:3], elsewhere], BOTH)[3]] == [(0,), (2,)]


def test_a_failed_rollout_of_a_frozen_opener_starts_from_a_state_of_its_own() -> None:
    frozen = [
        replace(one, calls=tuple(replace(each, prompt_ids=()) for each in one.calls))
        for one in (*RAGGED, failed("plan", "act", sample=4), failed("plan", "act", sample=5))
    ]
    with_failures = by_state(turns_of(frozen, BOTH), 0.5)
    assert with_failures == by_state(turns_of(RAGGED, BOTH), 0.5)
    (group,) = by_advantage(turns_of(frozen, BOTH), 0.5, 0.5)
    assert group.rewards[-2:] == (0.0, 0.0)


def test_what_the_metric_says_of_turns_fits_where_there_are_as_many() -> None:
    assert all(map(fits, RAGGED))
    assert fits(replace(RAGGED[0], turn_states=None))
    assert not fits(replace(RAGGED[0], turn_scores=(1.0, 0.0)))
    assert not fits(RAGGED[1], opener="act")
    assert [name for name, made in recipes().items() if made.by_turns] == ["gtpo", "gigpo", "gagpo"]


def test_examples_are_never_mixed() -> None:
    other = [replace(one, example=1) for one in RAGGED]
    for name in ("gtpo", "gigpo", "gagpo"):
        alone = by_place(name, RAGGED)
        both = by_place(name, [*RAGGED, *other])
        assert {key: value for key, value in both.items() if key[0] < 4} == alone


def test_a_call_that_is_too_old_takes_its_groups_with_it() -> None:
    rollouts = [replace(one, calls=tuple(replace(each, version=1) for each in one.calls)) for one in RAGGED]
    old = replace(rollouts[1], calls=(*rollouts[1].calls[:-1], replace(rollouts[1].calls[-1], version=0)))
    made = assign(recipe("gtpo"), [rollouts[0], old, *rollouts[2:]], BOTH, lambda each: each.version == 0)
    # only the third turn of the second rollout is old, and nobody else had one
    assert made.left_out == {"stale group": 2}
    assert len(made.credited) == 9


def test_silent_groups_are_dropped_where_no_group_of_the_call_teaches() -> None:
    same = [sequence(1.0, "plan", "plan", sample=at, states="st") for at in range(2)]
    made = assign(recipe("gigpo", drop_silent=True), same, BOTH)
    assert made.credited == ()
    assert made.left_out == {"silent group": 4}
    assert earned(made.groups[0].rewards, made.groups[0].owners) == [1.0] * 4


def test_the_presets_are_settings_of_flow_grpo() -> None:
    from modpo.optimizers import FlowGRPO

    made = FlowGRPO(lambda *_: 1.0, **FlowGRPO.PAPER)
    assert (made.recipe.clip_low, made.recipe.clip_high, made.recipe.kl) == (0.2, 0.3, 0.001)
    assert (made.settings.examples_per_step, made.settings.temperature) == (32, 0.5)
    assert made.recipe.normalise_over == "trajectories"
    assert FlowGRPO(lambda *_: 1.0, **FlowGRPO.PUBLIC_CODE).recipe.normalise_over == "calls"
