"""Imitation: cross-entropy on verified traces, the warm start before reinforcement."""

import random
from collections.abc import Callable, Sequence

from torch import Tensor

from modpo.config import WarmStart
from modpo.records import Call
from modpo.train.trainer import Objective, Trainer
from modpo.train.trie import Row


def imitate(
    trainer: Trainer,
    name: str,
    calls: Sequence[Call],
    warm: WarmStart,
    *,
    seed: int,
    max_grad_norm: float = 1.0,
    on_batch: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """One epoch of cross-entropy (mean over the batch's completion tokens) for one adapter.

    Args:
        calls: replayed traces of the adapter's modules.
        warm: batch size and learning rate.
        seed: orders the traces.
        on_batch: is told the size of each batch that is done.

    Returns:
        Means over the epoch's batches: ``loss`` in nats per token, ``grad_norm``, and summed ``trie_tokens``.
    """
    order = list(calls)
    random.Random(seed).shuffle(order)
    batches = [order[at : at + warm.batch_size] for at in range(0, len(order), warm.batch_size)]
    updates = []
    for batch in batches:
        rows = [Row(call.prompt_ids, call.completion_ids) for call in batch]
        objective = _cross_entropy(sum(len(row.completion) for row in rows))
        updates.append(
            trainer.update(name, rows, objective, learning_rate=warm.learning_rate, max_grad_norm=max_grad_norm)
        )
        if on_batch is not None:
            on_batch(len(batch))
    count = max(len(updates), 1)
    return {
        "loss": sum(update.loss for update in updates) / count,
        "grad_norm": sum(update.grad_norm for update in updates) / count,
        "trie_tokens": float(sum(update.trie_tokens for update in updates)),
    }


def _cross_entropy(tokens: int) -> Objective:
    def objective(logprobs: Tensor, rows: tuple[int, ...]) -> tuple[Tensor, dict[str, float]]:  # noqa: ARG001
        return -logprobs.sum() / tokens, {}

    return objective
