import pytest

from modpo.credit.aggregation import AggregationName, token_weights
from modpo.errors import ConfigError

LENGTHS = [1, 2, 5]
TERMS = [[6.0], [1.0, 3.0], [5.0, 0.0, 0.0, 0.0, 5.0]]  # row means 6, 2, 2


def total(weights: list[float]) -> float:
    return sum(weight * sum(row) for weight, row in zip(weights, TERMS, strict=True))


def test_seq_mean_token_mean_is_the_mean_of_row_means() -> None:
    assert token_weights(LENGTHS, "seq_mean_token_mean") == pytest.approx([1 / 3, 1 / 6, 1 / 15])
    assert total(token_weights(LENGTHS, "seq_mean_token_mean")) == pytest.approx(10 / 3)


def test_token_mean_is_the_mean_of_all_tokens() -> None:
    assert token_weights(LENGTHS, "token_mean") == [1 / 8] * 3
    assert total(token_weights(LENGTHS, "token_mean")) == pytest.approx(20 / 8)


def test_const_divides_by_what_sampling_allows() -> None:
    assert token_weights(LENGTHS, "const", max_tokens=10) == pytest.approx([1 / 30] * 3)


def test_const_needs_to_be_told_what_sampling_allows() -> None:
    with pytest.raises(ConfigError, match="give max_tokens"):
        token_weights(LENGTHS, "const")


def test_trajectory_is_the_mean_of_trajectories_of_the_mean_of_turns() -> None:
    # trajectory 7 has rows 0 and 2, trajectory 4 has row 1: (1/2) * ((6 + 2) / 2 + 2) = 3
    weights = token_weights(LENGTHS, "trajectory", trajectories_C=[7, 4, 7])
    assert weights == pytest.approx([1 / 4, 1 / 4, 1 / 20])
    assert total(weights) == pytest.approx(3)


def test_trajectories_of_one_call_are_the_mean_of_row_means() -> None:
    weights = token_weights(LENGTHS, "trajectory", trajectories_C=[0, 1, 2])
    assert weights == pytest.approx(token_weights(LENGTHS, "seq_mean_token_mean"))


@pytest.mark.parametrize("kind", ["seq_mean_token_mean", "token_mean", "trajectory"])
def test_shares_add_up_to_one(kind: AggregationName) -> None:
    weights = token_weights(LENGTHS, kind, trajectories_C=[0, 0, 1])
    assert sum(weight * length for weight, length in zip(weights, LENGTHS, strict=True)) == pytest.approx(1)


@pytest.mark.parametrize("kind", ["seq_mean_token_mean", "token_mean", "const", "trajectory"])
def test_no_rows_have_no_weights(kind: AggregationName) -> None:
    assert token_weights([], kind, trajectories_C=[], max_tokens=8) == []
