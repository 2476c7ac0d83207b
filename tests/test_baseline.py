import math
from typing import Any, get_args

import pytest

from modpo.credit.baseline import BaselineName, advantages, dr_grpo, grpo, require_finite, rloo
from modpo.errors import MetricError

ONE_OF_FOUR = [1.0, 0.0, 0.0, 0.0]
NAMES: tuple[BaselineName, ...] = get_args(BaselineName)


def test_grpo_of_one_right_in_four() -> None:
    # mean 1/4; ddof 1: sd = sqrt((9/16 + 3/16) / 3) = 1/2; ddof 0: sd = sqrt(3)/4
    assert grpo(ONE_OF_FOUR) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert grpo(ONE_OF_FOUR, ddof=0) == pytest.approx([1.732, -0.577, -0.577, -0.577], abs=1e-3)


def test_dr_grpo_and_rloo_of_one_right_in_four() -> None:
    assert dr_grpo(ONE_OF_FOUR) == [0.75, -0.25, -0.25, -0.25]
    assert rloo(ONE_OF_FOUR) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_rloo_is_the_reward_less_the_mean_of_the_others() -> None:
    assert rloo([3.0, 1.0, -1.0]) == pytest.approx([3 - 0, 1 - 1, -1 - 2])


@pytest.mark.parametrize("name", NAMES)
def test_advantages_add_up_to_zero_and_keep_the_order(name: BaselineName) -> None:
    rewards = [0.3, -2.0, 0.9, 0.30001, 7.5]
    given = advantages(rewards, name)
    assert math.fsum(given) == pytest.approx(0, abs=1e-9)
    assert sorted(range(5), key=given.__getitem__) == sorted(range(5), key=rewards.__getitem__)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_rollouts_changes_no_bit(name: BaselineName) -> None:
    rewards = [0.1, 0.2, 0.3, 1e8, -1e8, 0.7]
    assert advantages(rewards[::-1], name) == advantages(rewards, name)[::-1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rewards", [[], [0.7], [0.1 + 0.2, 0.3, 0.3], [1.0] * 8])
def test_no_spread_gives_exactly_zero(name: BaselineName, rewards: list[float]) -> None:
    assert advantages(rewards, name) == [0.0] * len(rewards)


@pytest.mark.parametrize("name", NAMES)
def test_a_singleton_may_keep_its_raw_reward(name: BaselineName) -> None:
    assert advantages([0.7], name, singleton="raw") == [0.7]
    assert advantages([0.7, 0.7], name, singleton="raw") == [0.0, 0.0]


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_an_error_that_says_where(bad: Any) -> None:
    with pytest.raises(MetricError, match=f"a group: the reward is {bad}"):
        advantages([1.0, bad])
    with pytest.raises(MetricError, match="example 7"):
        require_finite([0.0, bad], "example 7")


def test_the_baseline_and_its_ddof_are_chosen_by_name() -> None:
    assert advantages(ONE_OF_FOUR, "dr_grpo") == dr_grpo(ONE_OF_FOUR)
    assert advantages(ONE_OF_FOUR, "rloo") == rloo(ONE_OF_FOUR)
    assert advantages(ONE_OF_FOUR, "grpo", ddof=0) == grpo(ONE_OF_FOUR, 0)
