"""Reinforcement: one adapter's update from credited calls, as a recipe says."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modpo.credit.aggregation import token_weights
from modpo.credit.loss import LossInputs, Stats, add_stats, loss
from modpo.credit.recipe import Recipe
from modpo.records import Call
from modpo.train.trainer import Objective, Trainer, Update
from modpo.train.trie import Row


@dataclass(frozen=True, slots=True)
class Lesson:
    """A call of the adapter in training, its advantage, and the trajectory (rollout) it is part of."""

    call: Call
    advantage: float
    trajectory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How to step: AdamW's rate and decay, the gradient's bound, and how many updates a batch is cut into."""

    learning_rate: float
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    updates: int = 1
    max_tokens: int | None = None
    seed: int = 0


def reinforce(trainer: Trainer, name: str, lessons: Sequence[Lesson], recipe: Recipe, step: Step) -> Stats:
    """Update one adapter from all its credited calls of a step.

    Calls without advantage count in the loss's means; they are run through the model only when a KL term
    gives them a gradient.

    Args:
        lessons: the adapter's calls, all sampled at one temperature.
        recipe: what the loss is.
        step: how to step.

    Returns:
        The recipe's statistics, and ``loss``, ``grad_norm``, ``entropy`` (nats), ``trie_tokens``,
        ``row_tokens``, ``updates``. No updates: nothing to learn, and the adapter is as it was.
    """
    order = list(lessons)
    random.Random(step.seed).shuffle(order)
    size = -(-len(order) // step.updates)
    parts = [order[at : at + size] for at in range(0, len(order), size)] if order else []
    taught = [_prepare(trainer, name, part, recipe, step) for part in parts]
    updates = [_update(trainer, name, batch, recipe, step) for batch in taught if batch is not None]
    return _summary(updates)


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one update is made of, per row; tensors [L_i]."""

    rows: list[Row]
    weights: list[float]
    advantages: list[float]
    behaviour: list[Tensor]
    old: list[Tensor] | None
    reference: list[Tensor] | None
    temperature: float


def _prepare(trainer: Trainer, name: str, lessons: list[Lesson], recipe: Recipe, step: Step) -> _Batch | None:
    weights = token_weights(
        [len(lesson.call.completion_ids) for lesson in lessons],
        recipe.aggregation,
        trajectories_C=[lesson.trajectory for lesson in lessons],
        max_tokens=step.max_tokens,
    )
    kept = [
        (lesson, w) for lesson, w in zip(lessons, weights, strict=True) if lesson.advantage or recipe.kl is not None
    ]
    if not kept:
        return None
    calls = [lesson.call for lesson, _ in kept]
    rows = [Row(call.prompt_ids, call.completion_ids) for call in calls]
    temperature = calls[0].temperature
    return _Batch(
        rows=rows,
        weights=[weight for _, weight in kept],
        advantages=[lesson.advantage for lesson, _ in kept],
        behaviour=[torch.tensor(call.logprobs) for call in calls],
        # with a single update the weights in training are the ones that sampled: no extra pass
        old=trainer.logprobs(name, rows, temperature) if step.updates > 1 else None,
        reference=trainer.logprobs(None, rows, temperature) if recipe.kl is not None else None,
        temperature=temperature,
    )


def _update(trainer: Trainer, name: str, batch: _Batch, recipe: Recipe, step: Step) -> Update:
    return trainer.update(
        name,
        batch.rows,
        _objective(batch, recipe, trainer.device),
        learning_rate=step.learning_rate,
        temperature=batch.temperature,
        max_grad_norm=step.max_grad_norm,
        weight_decay=step.weight_decay,
    )


def _objective(batch: _Batch, recipe: Recipe, device: torch.device) -> Objective:
    def objective(logprobs: Tensor, rows: tuple[int, ...]) -> tuple[Tensor, Stats]:
        lengths = torch.tensor([len(batch.rows[row].completion) for row in rows], device=device)

        def spread(values: list[float]) -> Tensor:
            return torch.tensor([values[row] for row in rows], device=device).repeat_interleave(lengths)

        def joined(values: list[Tensor]) -> Tensor:
            return torch.cat([values[row] for row in rows]).to(device)

        inputs = LossInputs(
            logprobs=logprobs,
            old=logprobs.detach() if batch.old is None else joined(batch.old),
            behaviour=joined(batch.behaviour),
            advantages=spread(batch.advantages),
            weights=spread(batch.weights),
            rows=torch.tensor(rows, device=device).repeat_interleave(lengths),
            reference=None if batch.reference is None else joined(batch.reference),
        )
        return loss(recipe, inputs)

    return objective


def _summary(updates: list[Update]) -> Stats:
    count = max(len(updates), 1)
    return {
        **add_stats(update.stats for update in updates),
        "loss": sum(update.loss for update in updates) / count,
        "grad_norm": sum(update.grad_norm for update in updates) / count,
        "entropy": sum(update.entropy for update in updates) / count,
        "trie_tokens": float(sum(update.trie_tokens for update in updates)),
        "row_tokens": float(sum(update.row_tokens for update in updates)),
        "updates": float(len(updates)),
    }
