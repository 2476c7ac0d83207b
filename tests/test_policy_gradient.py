import math

import pytest
import torch

from modpo.credit.recipe import recipe
from modpo.errors import ConfigError
from modpo.records import Call
from modpo.train import policy_gradient
from modpo.train.policy_gradient import Lesson, Step, reinforce
from modpo.train.trainer import Trainer
from modpo.train.trie import Row, trie_tokens
from tests.oracle import SMALL, Oracle, assert_same, cases, tiny_trainer, trainer_gradients
from tests.tiny import tiny_model

ROWS = cases()["ragged"]
ADVANTAGES = (1.0, -0.5, 0.0, 2.0)
STILL = Step(learning_rate=0.0, max_grad_norm=1e9)


def lesson(row, advantage, logprobs, trajectory=0, temperature=1.0):
    call = Call(
        module="m",
        occurrence=0,
        model="modpo/tiny",
        adapter="a",
        version=0,
        prompt_ids=row.prompt,
        completion_ids=row.completion,
        logprobs=tuple(logprobs),
        temperature=temperature,
    )
    return Lesson(call, advantage, trajectory)


def lessons_of(trainer, rows=ROWS, advantages=ADVANTAGES, temperature=1.0):
    """Lessons whose sampler was the trainer itself."""
    sampled = trainer.logprobs("a", rows, temperature)
    return [
        lesson(row, advantage, lp.tolist(), at, temperature)
        for at, (row, advantage, lp) in enumerate(zip(rows, advantages, sampled, strict=True))
    ]


def parameters(trainer):
    return [factor.detach().clone() for factor in trainer.adapter("a").parameters()]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("pack_tokens", [4096, 1])
def test_on_policy_the_gradient_is_that_of_reinforce(temperature, pack_tokens):
    trainer = tiny_trainer()
    trainer.pack_tokens = pack_tokens
    oracle = Oracle("llama", trainer.adapter("a"))
    stats = reinforce(trainer, "a", lessons_of(trainer, temperature=temperature), recipe("mmgrpo"), STILL)
    # the mean over all four rows, the silent one included, of the mean over a row's tokens of -A lp
    loss = -sum(
        advantage * oracle.logprobs(row, temperature).mean() for row, advantage in zip(ROWS, ADVANTAGES, strict=True)
    ) / len(ROWS)
    assert_same(trainer_gradients(trainer), oracle.gradients(loss))
    # every ratio is 1, so that the loss's value is minus the mean advantage
    assert stats["loss"] == pytest.approx(-(1.0 - 0.5 + 0.0 + 2.0) / 4, rel=1e-4)
    assert stats["ratio_max"] == 1.0
    assert stats["mismatch_k3"] == pytest.approx(0.0, abs=1e-5)


def test_one_token_by_hand():
    """With A = 2 on one token the gradient is -2 d lp, and the log-odds of that token rise."""
    row = Row((5, 6, 7), (8,))
    trainer = tiny_trainer()
    oracle = Oracle("llama", trainer.adapter("a"))
    before = oracle.logprobs(row)
    reinforce(trainer, "a", [lesson(row, 2.0, [before.item()])], recipe("mmgrpo"), STILL)
    assert_same(trainer_gradients(trainer), oracle.gradients(-2.0 * before[0]))
    reinforce(trainer, "a", [lesson(row, 2.0, [before.item()])], recipe("mmgrpo"), Step(learning_rate=1e-3))
    assert trainer.logprobs("a", [row])[0].item() > before.item()


def test_calls_without_advantage_count_in_the_mean_and_cost_no_forward(monkeypatch):
    trainer = tiny_trainer()
    lessons = lessons_of(trainer)
    forwards = []
    plain = Trainer._forward
    monkeypatch.setattr(
        Trainer, "_forward", lambda self, pack, t: forwards.append(len(pack.ids)) or plain(self, pack, t)
    )
    taught = [row for row, advantage in zip(ROWS, ADVANTAGES, strict=True) if advantage]
    stats = reinforce(trainer, "a", lessons, recipe("mmgrpo"), STILL)
    assert forwards == [trie_tokens(taught)]
    assert stats["trie_tokens"] == trie_tokens(taught)
    assert stats["row_tokens"] == sum(len(row.ids) for row in taught)
    assert stats["tokens"] == sum(len(row.completion) for row in taught)
    whole = trainer_gradients(trainer)
    reinforce(trainer, "a", [one for one in lessons if one.advantage], recipe("mmgrpo"), STILL)
    fewer = trainer_gradients(trainer)  # a mean over three rows instead of four
    assert_same(whole, {path: (3 / 4 * down, 3 / 4 * up) for path, (down, up) in fewer.items()})


def test_trajectories_share_their_weight_among_their_calls():
    trainer = tiny_trainer()
    oracle = Oracle("llama", trainer.adapter("a"))
    sampled = trainer.logprobs("a", ROWS)
    owners = (0, 0, 0, 1)  # three calls of one rollout, one call of another
    lessons = [lesson(row, 1.0, lp.tolist(), owner) for row, lp, owner in zip(ROWS, sampled, owners, strict=True)]
    reinforce(trainer, "a", lessons, recipe("flow_grpo"), STILL)
    means = [oracle.logprobs(row).mean() for row in ROWS]
    assert_same(trainer_gradients(trainer), oracle.gradients(-((means[0] + means[1] + means[2]) / 3 + means[3]) / 2))


def test_a_sampler_that_differs_is_weighted_and_truncated():
    row = Row((5, 6, 7), (8, 9, 10))
    trainer = tiny_trainer()
    oracle = Oracle("llama", trainer.adapter("a"))
    mine = oracle.logprobs(row)
    # importance exp(old - behaviour): 1.5, 0.5, and 10 truncated to 2
    shifts = torch.tensor([math.log(1.5), math.log(0.5), math.log(10.0)])
    stats = reinforce(trainer, "a", [lesson(row, 1.0, (mine.detach() - shifts).tolist())], recipe("mmgrpo"), STILL)
    weights = torch.tensor([1.5, 0.5, 2.0])
    assert_same(trainer_gradients(trainer), oracle.gradients(-(weights * mine).mean()))
    assert stats["truncated"] == 1.0


def test_a_kl_term_keeps_the_calls_without_advantage():
    trainer = tiny_trainer()
    oracle, base = Oracle("llama", trainer.adapter("a")), Oracle("llama", None)
    lessons = lessons_of(trainer, advantages=(0.0, 0.0, 0.0, 1.0))
    stats = reinforce(trainer, "a", lessons, recipe("mmgrpo", kl=0.3), STILL)
    loss = -oracle.logprobs(ROWS[3]).mean() / 4
    total = 0.0
    for row in ROWS:
        mine = oracle.logprobs(row)
        d = base.logprobs(row).detach() - mine
        k3 = d.exp() - d - 1
        total += k3.sum().item()
        loss = loss + 0.3 * k3.mean() / 4
    assert_same(trainer_gradients(trainer), oracle.gradients(loss))
    assert stats["kl"] == pytest.approx(total, rel=1e-3)
    assert stats["trie_tokens"] == trie_tokens(ROWS)


def test_a_kl_term_does_nothing_at_version_zero():
    trainer = Trainer(tiny_model(), SMALL, ("a",))
    stats = reinforce(trainer, "a", lessons_of(trainer, advantages=(0.0,) * 4), recipe("mmgrpo", kl=0.3), STILL)
    assert stats["kl"] == pytest.approx(0.0, abs=1e-6)
    assert stats["updates"] == 1.0


def spied(monkeypatch):
    seen = []
    plain = policy_gradient.loss

    def spy(recipe, inputs):
        seen.append(inputs)
        return plain(recipe, inputs)

    monkeypatch.setattr(policy_gradient, "loss", spy)
    return seen


def test_several_updates_compare_with_the_weights_that_the_step_began_with(monkeypatch):
    trainer = tiny_trainer()
    advantages = (1.0, -0.5, 0.3, 2.0)
    lessons = lessons_of(trainer, advantages=advantages)
    before = dict(zip(ROWS, trainer.logprobs("a", ROWS), strict=True))
    seen = spied(monkeypatch)
    stats = reinforce(trainer, "a", lessons, recipe("mmgrpo"), Step(learning_rate=1e-2, updates=2))
    assert stats["updates"] == 2.0
    first, second = seen
    taught = {advantages.index(pytest.approx(a)) for part in seen for a in part.advantages.unique().tolist()}
    assert taught == {0, 1, 2, 3}
    for part in seen:
        wanted = [
            before[ROWS[advantages.index(pytest.approx(a))]] for a in part.advantages.unique_consecutive().tolist()
        ]
        assert torch.allclose(part.old, torch.cat(wanted), atol=1e-4)
    assert torch.allclose(first.logprobs, first.old, atol=1e-5)
    assert not torch.allclose(second.logprobs, second.old, atol=1e-3)
    assert stats["ratio_max"] == pytest.approx((second.logprobs - second.old).exp().max().item())
    # each update is a mean over its own two rows
    assert [part.weights.sum().item() for part in seen] == pytest.approx([1.0, 1.0])


def test_a_single_update_needs_no_pass_for_the_old_logprobs(monkeypatch):
    trainer = tiny_trainer()
    lessons = lessons_of(trainer)
    passes = []
    plain = Trainer.logprobs
    monkeypatch.setattr(Trainer, "logprobs", lambda *given: passes.append(given[1]) or plain(*given))
    reinforce(trainer, "a", lessons, recipe("mmgrpo"), STILL)
    assert passes == []
    reinforce(trainer, "a", lessons, recipe("mmgrpo", kl=0.1), STILL)
    assert passes == [None]
    reinforce(trainer, "a", lessons, recipe("mmgrpo"), Step(learning_rate=0.0, updates=4))
    assert passes == [None, "a", "a", "a"]  # the call without advantage fills a part of its own


@pytest.mark.parametrize("advantages", [(), (0.0,) * 4])
def test_nothing_to_learn_leaves_adapter_and_moments_as_they_were(advantages):
    trainer = tiny_trainer()
    reinforce(trainer, "a", lessons_of(trainer), recipe("mmgrpo"), Step(learning_rate=1e-2))
    before = parameters(trainer)
    moments = {at: entry["exp_avg"].clone() for at, entry in enumerate(trainer.optimizers["a"].state.values())}
    rows = ROWS[: len(advantages)]
    stats = reinforce(
        trainer,
        "a",
        lessons_of(trainer, rows, advantages),
        recipe("mmgrpo"),
        Step(learning_rate=1e-2, weight_decay=0.1),
    )
    assert stats["updates"] == stats["loss"] == stats["trie_tokens"] == 0.0
    assert all(map(torch.equal, before, parameters(trainer)))
    after = [entry["exp_avg"] for entry in trainer.optimizers["a"].state.values()]
    assert all(torch.equal(moments[at], moment) for at, moment in enumerate(after))


def test_gspo_takes_one_ratio_per_row_however_rows_are_packed():
    gradients = []
    for pack_tokens in (4096, 1):
        trainer = tiny_trainer()
        trainer.pack_tokens = pack_tokens
        reinforce(trainer, "a", lessons_of(trainer), recipe("gspo"), STILL)
        gradients.append(trainer_gradients(trainer))
    assert_same(*gradients)


def test_a_constant_divisor_must_be_given():
    trainer = tiny_trainer()
    with pytest.raises(ConfigError, match="max_tokens"):
        reinforce(trainer, "a", lessons_of(trainer), recipe("mmgrpo_dr"), STILL)
    oracle = Oracle("llama", trainer.adapter("a"))
    step = Step(learning_rate=0.0, max_grad_norm=1e9, max_tokens=8)
    reinforce(trainer, "a", lessons_of(trainer), recipe("mmgrpo_dr"), step)
    loss = -sum(a * oracle.logprobs(row).sum() for row, a in zip(ROWS, ADVANTAGES, strict=True)) / (4 * 8)
    assert_same(trainer_gradients(trainer), oracle.gradients(loss))
