import pytest

from modpo.credit.grouping import flow, mmgrpo
from modpo.credit.shaping import Overlong, punish_overlong
from modpo.errors import ConfigError
from modpo.records import Group, Member
from tests.credit_rollouts import call, rollout


@pytest.mark.parametrize(
    ("tokens", "punishment"), [(1, 0), (16384, 0), (17408, -0.25), (18432, -0.5), (20480, -1), (99999, -1)]
)
def test_dapo_punishes_from_the_buffer_on(tokens: int, punishment: float) -> None:
    assert Overlong().punishment(tokens) == punishment


def test_the_penalty_scales_the_punishment() -> None:
    assert Overlong(max_tokens=10, buffer_tokens=4, penalty=0.2).punishment(8) == pytest.approx(-0.1)


def test_a_buffer_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="buffer_tokens must be at most max_tokens"):
        Overlong.of(max_tokens=10, buffer_tokens=11)


RULE = Overlong(max_tokens=10, buffer_tokens=4)
ROLLOUTS = [rollout(1.0, call("a", 0, 8), call("a", 1, 10)), rollout(0.5, call("a", 0, 6))]


def test_each_call_of_a_group_is_judged_by_its_own_length() -> None:
    first, second = mmgrpo(ROLLOUTS, {"a"})
    assert punish_overlong(first, ROLLOUTS, RULE).rewards == (0.5, 0.5)
    assert punish_overlong(second, ROLLOUTS, RULE).rewards == (0.0,)


def test_a_trajectory_is_judged_by_its_longest_call() -> None:
    (group,) = flow([*ROLLOUTS, rollout(0.3)], {"a"})
    assert punish_overlong(group, ROLLOUTS, RULE).rewards == (0.0, 0.5, 0.3)


def test_a_group_without_owners_is_punished_member_by_member() -> None:
    group = Group(("any",), (Member(0, 1), Member(1, 0)), (1.0, 0.5))
    assert punish_overlong(group, ROLLOUTS, RULE).rewards == (0.0, 0.5)
