import random

import pytest
import torch

from modpo.config import WarmStart
from modpo.records import Call
from modpo.train.imitation import imitate
from modpo.train.trainer import Trainer
from modpo.train.trie import trie_tokens
from tests.oracle import SMALL, Oracle, assert_same, cases, tiny_trainer, trainer_gradients
from tests.tiny import tiny_model


def trace(row):
    return Call(
        module="m",
        occurrence=0,
        model="modpo/tiny",
        adapter="a",
        version=0,
        prompt_ids=row.prompt,
        completion_ids=row.completion,
        logprobs=(0.0,) * len(row.completion),
    )


ROWS = cases()["ragged"]
CALLS = [trace(row) for row in ROWS]


def test_the_loss_and_gradient_are_the_mean_over_the_batchs_completion_tokens():
    trainer = tiny_trainer()
    warm = WarmStart(batch_size=10, learning_rate=1e-12)  # so small a rate leaves fp32 weights as they are
    oracle = Oracle("llama", trainer.adapter("a"))
    found = imitate(trainer, "a", CALLS, warm, seed=0, max_grad_norm=1e9)
    tokens = sum(len(row.completion) for row in ROWS)
    assert tokens == 1 + 3 + 8 + 5
    loss = -sum(oracle.logprobs(row).sum() for row in ROWS) / tokens
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert found["trie_tokens"] == trie_tokens(ROWS)
    assert_same(trainer_gradients(trainer), oracle.gradients(loss))


def test_an_epoch_goes_over_every_trace_once_in_the_seeds_order(monkeypatch):
    batches = []
    plain = Trainer.update
    monkeypatch.setattr(
        Trainer,
        "update",
        lambda self, name, rows, *rest, **more: batches.append(rows) or plain(self, name, rows, *rest, **more),
    )
    imitate(tiny_trainer(), "a", CALLS, WarmStart(batch_size=3), seed=5)
    assert [len(batch) for batch in batches] == [3, 1]
    wanted = list(ROWS)
    random.Random(5).shuffle(wanted)
    assert [row for batch in batches for row in batch] == wanted


def test_the_same_seed_gives_the_same_adapter_and_the_callers_list_stays():
    calls = list(CALLS)
    trained = []
    for seed in (1, 1, 2):
        trainer = tiny_trainer()
        imitate(trainer, "a", calls, WarmStart(batch_size=2), seed=seed)
        trained.append(list(trainer.adapter("a").parameters()))
    assert calls == CALLS
    assert all(map(torch.equal, trained[0], trained[1]))
    assert not all(map(torch.equal, trained[0], trained[2]))


def test_repeated_epochs_learn_the_traces_by_heart():
    trainer = Trainer(tiny_model(), SMALL, ("a",))
    warm = WarmStart(batch_size=4, learning_rate=2e-2)
    calls = [trace(row) for row in cases()["nothing_shared"]]
    losses = [imitate(trainer, "a", calls, warm, seed=epoch)["loss"] for epoch in range(40)]
    assert losses[-1] < 0.1 * losses[0]


def test_no_traces_are_no_update():
    trainer = tiny_trainer()
    before = [factor.clone() for factor in trainer.adapter("a").parameters()]
    assert imitate(trainer, "a", [], WarmStart(), seed=0) == {"loss": 0.0, "grad_norm": 0.0, "trie_tokens": 0.0}
    assert all(map(torch.equal, before, trainer.adapter("a").parameters()))
