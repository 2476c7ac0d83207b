from typing import get_args

from modpo.credit.grouping import GROUPINGS, GroupingName, examples_with_spread, flow, mmgrpo, module, per_call
from modpo.records import Group, Member
from tests.credit_rollouts import call, earned, places, rollout

# "plan" once or never, "act" 0 to 3 times: nothing here is rectangular.
RAGGED = [rollout(1.0, "plan", "act", "act", "act"), rollout(0.0, "plan", "act"), rollout(0.5), rollout(0.25, "act")]
BOTH = {"plan", "act"}


def test_every_named_grouping_exists() -> None:
    assert set(get_args(GroupingName)) == set(GROUPINGS)


def test_mmgrpo_groups_the_kth_calls_and_stays_ragged() -> None:
    groups = {group.key: group for group in mmgrpo(RAGGED, BOTH)}
    assert {key: places(group) for key, group in groups.items()} == {
        (0, "plan", 0): [(0, 0), (1, 0)],
        (0, "act", 0): [(0, 1), (1, 1), (3, 0)],
        (0, "act", 1): [(0, 2)],
        (0, "act", 2): [(0, 3)],
    }
    assert groups[0, "act", 0].rewards == (1.0, 0.0, 0.25)
    assert all(earned(group.rewards, group.owners) == list(group.rewards) for group in groups.values())


def test_module_compares_the_rollouts_that_called_it() -> None:
    groups = {group.key: group for group in module(RAGGED, {"act"})}
    act = groups[0, "act"]
    assert list(groups) == [(0, "act")]
    assert places(act) == [(0, 1), (0, 2), (0, 3), (1, 1), (3, 0)]
    assert act.rewards == (1.0, 0.0, 0.25)
    assert act.owners == (0, 0, 0, 1, 2)


def test_flow_compares_trajectories_also_those_without_calls() -> None:
    (group,) = flow(RAGGED, BOTH)
    assert group.key == (0,)
    assert group.rewards == (1.0, 0.0, 0.5, 0.25)
    assert group.owners == (0, 0, 0, 0, 1, 1, 3)


def test_flow_leaves_out_an_example_that_nobody_can_learn_from() -> None:
    assert flow([rollout(1.0), rollout(0.0)], BOTH) == []


def test_per_call_counts_a_rollout_once_for_each_of_its_calls() -> None:
    (group,) = flow(RAGGED, BOTH)
    assert per_call(group).rewards == (1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.25)
    assert per_call(per_call(group)) == per_call(group)


def test_per_call_keeps_a_group_whose_members_have_their_own_rewards() -> None:
    group = Group(("any",), (Member(0, 0), Member(1, 0)), (1.0, 0.0))
    assert per_call(group).rewards == (1.0, 0.0)


def test_examples_are_never_mixed() -> None:
    rollouts = [rollout(1.0, "plan", example=4), rollout(0.0, "plan", example=9), rollout(0.5, "plan", example=4)]
    for grouping in GROUPINGS.values():
        groups = {group.key[0]: group for group in grouping(rollouts, {"plan"})}
        assert groups[4].rewards == (1.0, 0.5)
        assert groups[9].rewards == (0.0,)


def test_only_sampled_tokens_of_trained_modules_become_members() -> None:
    frozen, empty, other = call("plan", adapter=None), call("plan", tokens=0), call("other")
    rollouts = [rollout(1.0, frozen, empty, other, "plan"), rollout(0.0, "plan")]
    for grouping in GROUPINGS.values():
        assert {place for group in grouping(rollouts, {"plan"}) for place in places(group)} == {(0, 3), (1, 0)}


def test_examples_with_spread_are_those_worth_keeping() -> None:
    rewards = {3: (1.0, 1.0), 1: (0.0, 1.0), 2: (0.5,), 0: (0.1 + 0.2, 0.3), 5: (0.0, 0.01)}
    rollouts = [rollout(reward, example=example) for example, both in rewards.items() for reward in both]
    assert examples_with_spread(rollouts) == [1, 5]
    assert examples_with_spread([]) == []
