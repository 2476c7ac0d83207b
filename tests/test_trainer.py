import math

import pytest
import torch

from modpo.config import LoRA
from modpo.errors import PolicyError
from modpo.train import trainer as trainer_module
from modpo.train.trainer import Trainer, head_weight
from modpo.train.trie import Row, trie_tokens
from tests.oracle import (
    SMALL,
    Oracle,
    assert_same,
    cases,
    random_ids,
    randomised,
    tiny_trainer,
    token_weights,
    trainer_gradients,
)
from tests.tiny import KINDS, tiny_model


def weighted(weights):
    """The objective sum_t w_t lp_t, with the weights kept per row."""

    def objective(logprobs, rows):
        return (torch.cat([weights[row] for row in rows]) * logprobs).sum(), {"packs": 1.0}

    return objective


def oracle_gradients(oracle, rows, weights, temperature=1.0):
    loss = sum((w * oracle.logprobs(row, temperature)).sum() for row, w in zip(rows, weights, strict=True))
    return oracle.gradients(loss), loss.item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", list(cases()))
def test_logprobs_and_gradients_are_those_of_row_by_row_training(kind, case):
    rows = cases()[case]
    trainer = tiny_trainer(kind)
    oracle = Oracle(kind, trainer.adapter("a"))
    for mine, row in zip(trainer.logprobs("a", rows, 0.8), rows, strict=True):
        torch.testing.assert_close(mine, oracle.logprobs(row, 0.8).detach(), rtol=1e-4, atol=1e-5)
    weights = token_weights(rows)
    update = trainer.accumulate("a", rows, weighted(weights), 0.8)
    wanted, loss = oracle_gradients(oracle, rows, weights, 0.8)
    assert_same(trainer_gradients(trainer), wanted)
    assert update.loss == pytest.approx(loss, rel=1e-4, abs=1e-4)
    assert update.trie_tokens == trie_tokens(rows)
    assert update.row_tokens == sum(len(row.ids) for row in rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pack_tokens", [1, 34, 44])
@pytest.mark.parametrize("case", ["ragged", "multi_turn", "duplicates"])
def test_packs_split_by_subtree_add_up_to_the_same(kind, case, pack_tokens):
    rows = cases()[case]
    trainer = tiny_trainer(kind)
    trainer.pack_tokens = pack_tokens
    oracle = Oracle(kind, trainer.adapter("a"), attention="sdpa")
    weights = token_weights(rows)
    update = trainer.accumulate("a", rows, weighted(weights))
    assert update.stats["packs"] > 1
    assert_same(trainer_gradients(trainer), oracle_gradients(oracle, rows, weights)[0])
    for mine, row in zip(trainer.logprobs("a", rows), rows, strict=True):
        torch.testing.assert_close(mine, oracle.logprobs(row).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_changes_no_gradient(kind):
    rows = cases()["multi_turn"]
    weights = token_weights(rows)
    plain, saving = tiny_trainer(kind), tiny_trainer(kind)
    saving.checkpoint_activations(True)
    plain.accumulate("a", rows, weighted(weights))
    saving.accumulate("a", rows, weighted(weights))
    assert saving.model.is_activation_checkpointing
    assert_same(trainer_gradients(saving), trainer_gradients(plain))
    saving.checkpoint_activations(False)
    assert not saving.model.is_activation_checkpointing
    assert not saving.model.training


def test_entropy_is_the_mean_over_distinct_targets():
    # the second row repeats the first one's targets, so that it adds none
    rows = [Row((5, 6), (7, 8)), Row((5, 6), (7, 8)), Row((5, 6), (9,))]
    trainer = tiny_trainer()
    update = trainer.accumulate("a", rows, weighted([torch.ones(len(row.completion)) for row in rows]))
    oracle = Oracle("llama", trainer.adapter("a"))
    entropies = [-(d.exp() * d).sum(-1) for d in (oracle.distributions(row) for row in rows)]
    wanted = (entropies[0].sum() + entropies[2].sum()) / 3
    assert update.entropy == pytest.approx(wanted.item(), rel=1e-4)


@pytest.mark.parametrize("max_grad_norm", [1e9, 0.01])
def test_updates_are_those_of_adamw_on_the_oracles_gradients(max_grad_norm):
    rows = cases()["ragged"]
    weights = token_weights(rows)
    trainer = tiny_trainer()
    oracle = Oracle("llama", trainer.adapter("a"))
    leaves = [part for pair in oracle.factors.values() for part in pair]
    optimizer = torch.optim.AdamW(leaves, lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        found = trainer.update(
            "a", rows, weighted(weights), learning_rate=1e-2, weight_decay=0.1, max_grad_norm=max_grad_norm
        )
        wanted, loss = oracle_gradients(oracle, rows, weights)
        for leaf, grad in zip(leaves, [part for pair in wanted.values() for part in pair], strict=True):
            leaf.grad = grad
        norm = torch.nn.utils.clip_grad_norm_(leaves, max_grad_norm)
        optimizer.step()
        assert found.loss == pytest.approx(loss, rel=1e-3)
        assert found.grad_norm == pytest.approx(norm.item(), rel=1e-3)
    for path, pair in oracle.factors.items():
        for mine, theirs in zip(trainer.adapter("a").factors(path), pair, strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-3, atol=1e-4)


def test_an_update_changes_its_own_adapter_and_nothing_else():
    trainer = tiny_trainer(names=("a", "b"))
    rows = cases()["ragged"]
    base = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    other = [factor.clone() for factor in trainer.adapter("b").parameters()]
    mine = [factor.clone() for factor in trainer.adapter("a").parameters()]
    trainer.update("a", rows, weighted(token_weights(rows)), learning_rate=1e-2)
    assert all(torch.equal(base[name], weight) for name, weight in trainer.model.named_parameters())
    assert all(map(torch.equal, other, trainer.adapter("b").parameters()))
    assert not any(map(torch.equal, mine, trainer.adapter("a").parameters()))


def test_version_zero_answers_like_the_base():
    trainer = Trainer(tiny_model(), SMALL, ("a",))
    rows = cases()["ragged"]
    fresh, base = trainer.logprobs("a", rows), trainer.logprobs(None, rows)
    assert all(map(torch.equal, fresh, base))
    oracle = Oracle("llama", None)
    for mine, row in zip(base, rows, strict=True):
        torch.testing.assert_close(mine, oracle.logprobs(row), rtol=1e-4, atol=1e-5)
    randomised(trainer.adapter("a"))
    assert not any(map(torch.equal, trainer.logprobs("a", rows), base))


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_gradient_does_not_reach_the_weights(broken):
    trainer = tiny_trainer()
    rows = cases()["ragged"]
    before = [factor.clone() for factor in trainer.adapter("a").parameters()]
    update = trainer.update("a", rows, lambda logprobs, _: (logprobs.sum() * broken, {}), learning_rate=1e-2)
    assert not math.isfinite(update.grad_norm)
    assert all(map(torch.equal, before, trainer.adapter("a").parameters()))


def test_gradients_do_not_pile_up_from_update_to_update():
    trainer = tiny_trainer()
    rows = cases()["ragged"]
    weights = token_weights(rows)
    norms = [
        trainer.update("a", rows, weighted(weights), learning_rate=0.0, max_grad_norm=1e9).grad_norm for _ in range(2)
    ]
    assert norms[0] == norms[1]


def test_statistics_of_packs_join_by_sum_and_maxima_by_maximum():
    trainer = tiny_trainer()
    trainer.pack_tokens = 1
    rows = cases()["ragged"]

    def objective(logprobs, rows):
        return logprobs.sum(), {"rows": float(len(rows)), "row_max": float(max(rows))}

    assert trainer.accumulate("a", rows, objective).stats == {"rows": 4.0, "row_max": 3.0}


def test_a_bf16_base_trains_fp32_factors():
    trainer = Trainer(tiny_model().bfloat16(), LoRA(rank=2), ("a",))
    rows = [Row(random_ids(9, 1), random_ids(4, 2)), Row(random_ids(9, 1), random_ids(3, 3))]
    update = trainer.update("a", rows, weighted(token_weights(rows)), learning_rate=1e-2)
    assert math.isfinite(update.grad_norm)
    assert update.grad_norm > 0
    assert {factor.dtype for factor in trainer.adapter("a").parameters()} == {torch.float32}
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.bfloat16}
    assert trainer.logprobs("a", rows)[0].dtype == torch.float32


def test_a_second_trainer_takes_the_first_ones_place_on_a_model():
    model = tiny_model()
    rows = cases()["ragged"]
    base = Trainer(model, SMALL, ("a",)).logprobs(None, rows)
    second = Trainer(model, LoRA(rank=2, targets=("q_proj",)), ("b",))
    assert set(second.layers) == {f"model.layers.{at}.self_attn.q_proj" for at in range(2)}
    assert sum("LoRALinear" in type(module).__name__ for module in model.modules()) == 2
    assert all(map(torch.equal, base, second.logprobs("b", rows)))


def test_an_unknown_adapter_names_the_nearest():
    trainer = tiny_trainer(names=("planner", "writer"))
    with pytest.raises(PolicyError, match="did you mean 'planner'"):
        trainer.logprobs("plannr", cases()["ragged"])


def test_no_rows_are_no_update():
    trainer = tiny_trainer()
    before = [factor.clone() for factor in trainer.adapter("a").parameters()]
    update = trainer.update("a", [], weighted([]), learning_rate=1.0)
    assert (update.loss, update.grad_norm, update.trie_tokens, update.stats) == (0.0, 0.0, 0, {})
    assert all(map(torch.equal, before, trainer.adapter("a").parameters()))
    assert trainer.logprobs("a", []) == []


def test_full_logits_of_a_batch_never_exist(monkeypatch):
    """The head sees the states that predict completion tokens and no others."""
    rows = cases()["multi_turn"]
    seen = []
    plain = trainer_module.token_logprobs
    monkeypatch.setattr(
        trainer_module, "token_logprobs", lambda hidden, *rest: seen.append(len(hidden)) or plain(hidden, *rest)
    )
    tiny_trainer().logprobs("a", rows)
    # the turns' completions of 5, 7 and 1 tokens, and 7 tokens of another answer to the first
    assert seen == [20]


def test_heads_that_do_more_than_multiply_are_refused():
    model = tiny_model()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(PolicyError, match="final_logit_softcapping"):
        head_weight(model)
    model.config.final_logit_softcapping = None
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.lm_head.out_features))
    with pytest.raises(PolicyError, match="bias"):
        head_weight(model)
