"""Row-by-row training, the yardstick of the trie: attention as transformers has it, full logits, plain autograd."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from modpo.config import LoRA
from modpo.train.lora import Adapter
from modpo.train.trainer import Trainer
from modpo.train.trie import Row
from tests.tiny import VOCABULARY, Kind, tiny_model

SMALL = LoRA(rank=3, alpha=6.0)


def randomised(adapter: Adapter, seed: int = 7, size: float = 0.1) -> Adapter:
    """Give B random values, so that the adapter does something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for factor in adapter.up.values():
            factor.copy_(torch.randn(factor.shape, generator=generator) * size)
    return adapter


def tiny_trainer(kind: Kind = "llama", names: Sequence[str] = ("a",), lora: LoRA = SMALL) -> Trainer:
    trainer = Trainer(tiny_model(kind), lora, names)
    for at, name in enumerate(names):
        randomised(trainer.adapter(name), seed=7 + at)
    return trainer


class Oracle:
    """A model of its own whose linear weights are W + scale * B A, with leaves A and B that autograd follows."""

    def __init__(self, kind: Kind, adapter: Adapter | None, attention: str = "eager") -> None:
        self.model = tiny_model(kind).requires_grad_(False)
        self.model.set_attn_implementation(attention)
        self.adapter = adapter
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}
        for key in adapter.down if adapter is not None else ():
            pair = (adapter.down[key], adapter.up[key])
            self.factors[key.replace("/", ".")] = tuple(part.detach().clone().requires_grad_() for part in pair)

    def logits(self, ids: Sequence[int]) -> Tensor:
        """[L, V] of one row."""
        base = dict(self.model.named_parameters())
        weights = {
            f"{path}.weight": base[f"{path}.weight"] + self.adapter.lora.scale * up @ down
            for path, (down, up) in self.factors.items()
        }
        inputs = {"input_ids": torch.tensor([list(ids)]), "use_cache": False}
        return functional_call(self.model, weights, args=(), kwargs=inputs).logits[0]

    def distributions(self, row: Row, temperature: float = 1.0) -> Tensor:
        """[L_i, V] log-probabilities at each position of the completion."""
        first = len(row.prompt)
        return torch.log_softmax(self.logits(row.ids)[first - 1 : -1] / temperature, dim=-1)

    def logprobs(self, row: Row, temperature: float = 1.0) -> Tensor:
        """[L_i] of the completion's tokens."""
        return self.distributions(row, temperature).gather(1, torch.tensor(row.completion)[:, None]).squeeze(1)

    def gradients(self, loss: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Gradients of A and B by layer path."""
        flat = torch.autograd.grad(loss, [part for pair in self.factors.values() for part in pair])
        return {path: (flat[2 * at], flat[2 * at + 1]) for at, path in enumerate(self.factors)}


def trainer_gradients(trainer: Trainer, name: str = "a") -> dict[str, tuple[Tensor, Tensor]]:
    """Gradients that the trainer holds, in the oracle's form."""
    adapter = trainer.adapter(name)
    return {
        key.replace("/", "."): (adapter.down[key].grad.clone(), adapter.up[key].grad.clone()) for key in adapter.down
    }


def assert_same(found: dict[str, tuple[Tensor, Tensor]], wanted: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Every factor's gradient within 1e-4 of its own size."""
    assert found.keys() == wanted.keys()
    for path, pair in wanted.items():
        for mine, theirs in zip(found[path], pair, strict=True):
            assert (mine - theirs).norm() <= 1e-4 * theirs.norm(), path
            assert theirs.norm() > 0, path


def token_weights(rows: Sequence[Row], seed: int = 5) -> list[Tensor]:
    """A random weight for each completion token, so that no two tokens' gradients may be swapped unseen."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(len(row.completion), generator=generator) for row in rows]


def random_ids(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(2, VOCABULARY, (length,), generator=generator).tolist())


def cases() -> dict[str, list[Row]]:
    """Row sets of every shape that a batch of rollouts may have."""
    head, q1, q2 = random_ids(20, 1), random_ids(6, 2), random_ids(9, 3)
    a1, a2 = random_ids(5, 4), random_ids(7, 5)
    turn = random_ids(4, 6)
    return {
        "ragged": [Row(head + q1, random_ids(n, 10 + n)) for n in (1, 3, 8)] + [Row(head + q2, random_ids(5, 30))],
        "multi_turn": [
            Row(head + q1, a1),
            Row(head + q1 + a1 + turn, a2),
            Row(head + q1 + a1 + turn + a2 + turn, (9,)),
            Row(head + q1, a2),
        ],
        "single_token": [Row(head, (3,)), Row(head, (4,)), Row(head, (3,)), Row(q1, (3,)), Row((5,), (3,))],
        "duplicates": [Row(head + q1, a1), Row(head + q1, a1), Row(head + q2, a1), Row(head + q1, a1)],
        "one_is_a_prefix": [Row(head, a1 + a2), Row(head, a1), Row(head + a1, a2)],
        "nothing_shared": [Row(random_ids(n, 50 + n), random_ids(n, 60 + n)) for n in (2, 5, 9)],
        "long": [
            Row(head + random_ids(270, 70), random_ids(5, 71)),
            Row(head + random_ids(270, 70), random_ids(280, 72)),
            Row(head + random_ids(30, 73), random_ids(4, 74)),
        ],
    }
