import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from modpo.credit.loss import (
    LossInputs,
    add_stats,
    cispo,
    k3,
    loss,
    ppo_clip,
    sequence_ratio,
    token_ratio,
    truncated_importance,
)
from modpo.credit.recipe import LossName, Recipe, recipe

D = torch.float64


def tensor(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=D, requires_grad=grad)


def inputs(logprobs: Tensor, **given: Tensor) -> LossInputs:
    """On-policy, one row, advantage 1, equal weights, unless said otherwise."""
    n = logprobs.numel()
    usual = {
        "old": logprobs.detach(),
        "behaviour": given.get("old", logprobs).detach(),
        "advantages": torch.ones(n, dtype=D),
        "weights": torch.full((n,), 1 / max(n, 1), dtype=D),
        "rows": torch.zeros(n, dtype=torch.long),
    }
    return LossInputs(logprobs=logprobs, **{**usual, **given})


def with_loss(name: LossName, **options: Any) -> Recipe:
    return recipe("mmgrpo", loss=name, **options)


# ratio, advantage -> term and d term / d logprob, with clip 0.8 .. 1.28
PPO_CASES = [
    (1.0, 2.0, -2.0, -2.0),
    (1.2, 2.0, -2.4, -2.4),
    (1.5, 2.0, -2.56, 0.0),  # more of a good thing than the clip allows
    (0.5, 2.0, -1.0, -1.0),  # a good token that became rarer keeps its gradient
    (1.5, -2.0, 3.0, 3.0),  # a bad token that became likelier keeps its gradient
    (0.5, -2.0, 1.6, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "term", "slope"), PPO_CASES)
def test_ppo_clip_by_hand(ratio: float, advantage: float, term: float, slope: float) -> None:
    logprobs = tensor(math.log(ratio) - 1, grad=True)
    terms, stopped = ppo_clip(token_ratio(logprobs, tensor(-1)), tensor(advantage), 0.2, 0.28)
    terms.sum().backward()
    assert terms.item() == pytest.approx(term)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope)
    assert stopped.item() == (slope == 0)


def test_a_bound_holds_a_bad_token_that_became_far_likelier() -> None:
    ratios = tensor(3.0, 5.0, 5.0, 0.5).log().requires_grad_()
    terms, stopped = ppo_clip(token_ratio(ratios, tensor(0)), tensor(-2, -2, 1, -2), 0.2, 0.28, 4.0)
    terms.sum().backward()
    assert terms.tolist() == pytest.approx([6.0, 8.0, -1.28, 1.6])
    assert ratios.grad is not None
    assert ratios.grad.tolist() == pytest.approx([6.0, 0.0, 0.0, 0.0])
    assert stopped.tolist() == [False, True, True, True]


def test_log_ratios_are_clamped_at_20() -> None:
    ratios = token_ratio(tensor(0, -1000), tensor(-1000, 0))
    assert ratios.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


def test_sequence_ratio_is_the_geometric_mean_of_each_row() -> None:
    logprobs, old = tensor(-1.0, -2.0, -0.5, -3.0), tensor(-1.2, -2.0, -0.7, -2.0)
    rows = torch.tensor([8, 3, 8, 3])  # any numbers, in any order
    expected = [math.exp((0.2 + 0.2) / 2), math.exp((0.0 - 1.0) / 2)] * 2
    assert sequence_ratio(logprobs, old, rows).tolist() == pytest.approx(expected)


def test_sequence_ratio_has_the_gradient_of_the_row_ratio() -> None:
    old, rows = tensor(-1.2, -2.0, -0.7, -2.0, -0.1), torch.tensor([1, 0, 1, 0, 0])
    values = (-1.0, -2.0, -0.5, -3.0, -0.3)
    logprobs, by_hand = tensor(*values, grad=True), tensor(*values, grad=True)
    advantage_of_row = tensor(-3.0, 2.0)
    length = tensor(3.0, 2.0)
    # mean over the tokens of a row, then sum over rows, of s * A
    (sequence_ratio(logprobs, old, rows) * (advantage_of_row / length)[rows]).sum().backward()
    ratios = [(by_hand - old)[rows == row].mean().exp() for row in (0, 1)]
    sum(ratio * a for ratio, a in zip(ratios, advantage_of_row, strict=True)).backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, by_hand.grad)
    # and by formula: s_i A_i / L_i for each token
    s = [math.exp((0.0 - 1.0 - 0.2) / 3), math.exp(0.2)]
    expected = [s[row] * [-3.0, 2.0][row] / [3, 2][row] for row in rows.tolist()]
    assert logprobs.grad.tolist() == pytest.approx(expected)


def test_sequence_log_ratio_is_capped_at_10() -> None:
    assert sequence_ratio(tensor(0.0), tensor(-50.0), torch.tensor([0])).item() == pytest.approx(math.exp(10))


def test_gspo_clips_whole_rows() -> None:
    # log s = 5e-4 > log(1 + 4e-4) for row 0; row 1 is on policy
    logprobs = tensor(-1.0, -1.0, -2.0, grad=True)
    given = inputs(logprobs, old=tensor(-1.001, -1.0, -2.0), rows=torch.tensor([0, 0, 1]))
    value, stats = loss(recipe("gspo"), given)
    value.backward()
    assert value.item() == pytest.approx(-(2 * 1.0004 + 1) / 3)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0, 0, -1 / 3])
    assert stats["clipped"] == 2


def test_cispo_bounds_the_weight_and_keeps_every_gradient() -> None:
    logprobs = tensor(-1.0, -1.0, grad=True)
    terms, changed = cispo(tensor(9.0, 0.5), logprobs, tensor(2.0, -1.0), 4.0)
    terms.sum().backward()
    assert terms.tolist() == pytest.approx([5 * 2.0, -0.5])
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-10.0, 0.5])
    assert changed.tolist() == [True, False]


def test_cispo_ratio_carries_no_gradient() -> None:
    logprobs = tensor(-1.0, grad=True)
    value, _ = loss(with_loss("cispo"), inputs(logprobs, old=tensor(-1.1)))
    value.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-math.exp(0.1))


def test_truncated_importance_by_hand() -> None:
    weights = truncated_importance(tensor(-1, -1, -1, grad=True), tensor(-1, -1.5, -3), 2.0)
    assert weights.tolist() == pytest.approx([1, math.exp(0.5), 2])
    assert not weights.requires_grad


def test_importance_weights_scale_the_policy_term_but_not_the_kl() -> None:
    logprobs, behaviour, reference = tensor(-1.0), tensor(-5.0), tensor(-1.0 + math.log(2))
    given = inputs(logprobs, behaviour=behaviour, reference=reference)
    value, stats = loss(with_loss("ppo", tis_cap=2.0, kl=0.1), given)
    assert value.item() == pytest.approx(-2 + 0.1 * (2 - math.log(2) - 1))
    assert stats["truncated"] == 1
    assert stats["kl"] == pytest.approx(1 - math.log(2))


def test_without_a_cap_the_sampler_is_trusted() -> None:
    value, stats = loss(with_loss("ppo", tis_cap=None), inputs(tensor(-1.0), behaviour=tensor(-5.0)))
    assert value.item() == pytest.approx(-1)
    assert "truncated" not in stats


def test_k3_by_hand_and_never_negative() -> None:
    assert k3(tensor(-1.0, -1.0), tensor(-1.0, -2.0)).tolist() == pytest.approx([0, math.exp(-1)])
    assert (k3(torch.linspace(-40, 0, 50, dtype=D), tensor(-3.0)) >= 0).all()


def test_k3_pulls_towards_the_base() -> None:
    logprobs = tensor(-1.0, grad=True)
    k3(logprobs, tensor(-2.0)).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(1 - math.exp(-1))


@pytest.mark.parametrize("name", get_args(LossName))
def test_on_policy_every_loss_has_the_policy_gradient(name: LossName) -> None:
    logprobs = tensor(-1.0, -0.5, -2.0, grad=True)
    advantages, weights = tensor(1.5, 1.5, -0.5), tensor(0.25, 0.25, 0.5)
    given = inputs(logprobs, advantages=advantages, weights=weights, rows=torch.tensor([0, 0, 1]))
    value, stats = loss(with_loss(name), given)
    value.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -weights * advantages)
    assert stats == {"tokens": 3, "clipped": 0, "truncated": 0, "mismatch_k3": 0, "ratio_max": 1}


@pytest.mark.parametrize("name", get_args(LossName))
def test_packs_add_up_to_the_whole(name: LossName) -> None:
    generator = torch.Generator().manual_seed(0)
    n, rows = 12, torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 4, 4])

    def draw() -> Tensor:
        return torch.randn(n, generator=generator, dtype=D) * 0.3 - 1

    columns = {"old": draw(), "behaviour": draw(), "reference": draw(), "advantages": draw() + 1, "weights": draw()}
    chosen, whole, cut = with_loss(name, kl=0.05), draw().requires_grad_(), []
    expected, stats = loss(chosen, inputs(whole, rows=rows, **columns))
    expected.backward()
    pieces = whole.detach().clone().requires_grad_()
    for part in (slice(0, 4), slice(4, 8), slice(8, 12)):
        given = {key: column[part] for key, column in columns.items()}
        value, piece = loss(chosen, inputs(pieces[part], rows=rows[part], **given))
        value.backward()
        cut.append(piece)
    assert pieces.grad is not None
    torch.testing.assert_close(pieces.grad, whole.grad)
    assert add_stats(cut) == pytest.approx(stats)


def test_statistics_are_joined_by_sum_and_maximum() -> None:
    parts = [{"tokens": 2.0, "ratio_max": 1.5}, {"tokens": 3.0, "ratio_max": 1.1, "kl": 0.5}]
    assert add_stats(parts) == {"tokens": 5, "ratio_max": 1.5, "kl": 0.5}
    assert add_stats([]) == {}


@pytest.mark.parametrize("name", get_args(LossName))
def test_a_pack_without_tokens_gives_zero_and_not_nan(name: LossName) -> None:
    value, stats = loss(with_loss(name), inputs(tensor(), weights=tensor()))
    assert value.item() == 0
    assert set(stats.values()) == {0.0}


def test_single_precision_stays_single() -> None:
    ones = torch.ones(2)
    rows = torch.zeros(2, dtype=torch.long)
    given = LossInputs(logprobs=-ones, old=-ones, behaviour=-ones, advantages=ones, weights=ones / 2, rows=rows)
    assert all(loss(with_loss(name), given)[0].dtype == torch.float32 for name in get_args(LossName))
