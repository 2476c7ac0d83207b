"""Updates of adapters: rows are packed into tries, run through the base model, and credited token by token."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modpo.config import LoRA
from modpo.credit.loss import add_stats
from modpo.errors import PolicyError, nearest
from modpo.train.attention import TrieLayout, register
from modpo.train.head import token_logprobs
from modpo.train.lora import Adapter, activated, load_adapter, save_adapter, target_layers, unwrap, wrap
from modpo.train.trie import Pack, Row, pack_rows

Objective = Callable[[Tensor, tuple[int, ...]], tuple[Tensor, dict[str, float]]]
"""Loss of a pack: (logprobs [N] of its rows' completion tokens, row after row; the rows' indices) -> (scalar, stats).

Losses and stats of packs are joined (`add_stats`), so an objective carries its own normalisation over the whole batch.
"""


@dataclass(frozen=True, slots=True)
class Update:
    """What an update did: summed stats, loss, gradient norm, and the tokens it went over."""

    loss: float
    grad_norm: float
    stats: dict[str, float]
    row_tokens: int
    trie_tokens: int
    entropy: float


class Trainer:
    """A frozen base model with named LoRA adapters, each with an AdamW of its own.

    Args:
        model: a transformers causal LM with full attention; its linear layers are wrapped, its
            weights stay as they are.
        lora: shape of the adapters.
        adapters: their names.
        seed: start of the A factors; B starts at zero, so that version 0 answers like the base.
        pack_tokens: bound on the tokens of one forward pass.
    """

    def __init__(self, model: nn.Module, lora: LoRA, adapters: Sequence[str], *, seed: int = 0) -> None:
        self.model = model.requires_grad_(False)
        self.device = next(model.parameters()).device
        self.lora = lora
        self.pack_tokens = 4096
        self.deterministic = False
        self._recompute = False
        model.set_attn_implementation(register())  # type: ignore[operator]
        unwrap(model)  # a trainer before this one may have wrapped it
        self.layers = target_layers(model, lora)
        self.wrapped = wrap(model, self.layers)
        self.adapters = {name: Adapter(self.layers, lora, seed + at) for at, name in enumerate(adapters)}
        self.optimizers = {
            name: torch.optim.AdamW(adapter.parameters(), lr=0.0, weight_decay=0.0)
            for name, adapter in self.adapters.items()
        }

    def checkpoint_activations(self, on: bool) -> None:
        """Recompute layers in the backward pass instead of storing their activations."""
        if on == self._recompute:
            return
        self._recompute = on
        self.model.train(on)  # transformers checkpoints only in training mode; causal LMs here have no dropout
        getattr(self.model, f"activation_checkpointing_{'enable' if on else 'disable'}")()

    def adapter(self, name: str) -> Adapter:
        """The adapter of that name."""
        if name not in self.adapters:
            raise PolicyError(f"unknown adapter {name!r}; {nearest(name, self.adapters)}")
        return self.adapters[name]

    @torch.no_grad()
    def logprobs(self, name: str | None, rows: Sequence[Row], temperature: float = 1.0) -> list[Tensor]:
        """Logprobs [L_i] (fp32, nats, on the CPU) of each row's completion under an adapter or the base."""
        found: list[Tensor] = [torch.empty(0)] * len(rows)
        with activated(self.wrapped, None if name is None else self.adapter(name)):
            for pack in pack_rows(rows, self.pack_tokens):
                logprobs, _ = self._forward(pack, temperature)
                for row, picks in zip(pack.rows, pack.picks, strict=True):
                    found[row] = logprobs[list(picks)].cpu()
        return found

    def update(
        self,
        name: str,
        rows: Sequence[Row],
        objective: Objective,
        *,
        learning_rate: float,
        temperature: float = 1.0,
        max_grad_norm: float = 1.0,
        weight_decay: float = 0.0,
    ) -> Update:
        """One AdamW step of one adapter on all rows; gradients of the packs are added up."""
        adapter, optimizer = self.adapter(name), self.optimizers[name]
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = learning_rate, weight_decay
        optimizer.zero_grad(set_to_none=True)
        with _deterministic(self.deterministic):
            update = self.accumulate(name, rows, objective, temperature)
        norm = float(nn.utils.clip_grad_norm_(adapter.parameters(), max_grad_norm))
        if norm == norm and norm != float("inf"):  # a broken gradient must not reach the weights
            optimizer.step()
        return Update(update.loss, norm, update.stats, update.row_tokens, update.trie_tokens, update.entropy)

    def accumulate(self, name: str, rows: Sequence[Row], objective: Objective, temperature: float = 1.0) -> Update:
        """Add the gradients of an objective to an adapter's factors, without a step."""
        loss_sum, entropy_sum, targets, trie = 0.0, 0.0, 0, 0
        stats: dict[str, float] = {}
        with activated(self.wrapped, self.adapter(name)):
            for pack in pack_rows(rows, self.pack_tokens):
                logprobs, entropy = self._forward(pack, temperature)
                picks = torch.tensor([at for row in pack.picks for at in row], device=self.device)
                loss, found = objective(logprobs[picks], pack.rows)
                loss.backward()
                loss_sum += loss.item()
                entropy_sum += entropy.sum().item()
                targets += len(pack.targets)
                trie += len(pack.ids)
                stats = add_stats((stats, found))
        row_tokens = sum(len(row.ids) for row in rows)
        return Update(loss_sum, 0.0, stats, row_tokens, trie, entropy_sum / max(targets, 1))

    def _forward(self, pack: Pack, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies [N] of a pack's unique targets."""
        hidden = hidden_states(self.model, pack, TrieLayout.of(pack, self.device))
        sources = torch.tensor(pack.sources, device=self.device, dtype=torch.long)
        targets = torch.tensor(pack.targets, device=self.device, dtype=torch.long)
        return token_logprobs(hidden[sources], head_weight(self.model), targets, temperature)

    def save(self, name: str, base: str, folder: Path) -> None:
        """Write an adapter (PEFT's form) and its optimizer's moments (safetensors) into a folder."""
        save_adapter(self.adapter(name), base, folder)
        state = self.optimizers[name].state_dict()["state"]
        tensors = {f"{at}.{key}": value for at, entry in state.items() for key, value in entry.items()}
        save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, folder / "optimizer.safetensors")

    def load(self, name: str, folder: Path) -> None:
        """Read what `save` wrote; without optimizer moments the optimizer starts anew."""
        load_adapter(self.adapter(name), folder)
        moments = folder / "optimizer.safetensors"
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in (load_file(moments) if moments.exists() else {}).items():
            at, field = key.split(".", 1)
            state.setdefault(int(at), {})[field] = value
        optimizer = self.optimizers[name]
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

    def reset_moments(self, name: str) -> None:
        """Forget an optimizer's moments: another objective begins."""
        optimizer = self.optimizers[name]
        optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})


@contextmanager
def _deterministic(on: bool) -> Iterator[None]:
    """Within the block, sums over equal indices are made in a fixed order, if `on`."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def hidden_states(model: nn.Module, pack: Pack, layout: TrieLayout) -> Tensor:
    """Last hidden states [L, H] of a pack."""
    device = next(model.parameters()).device
    ids = torch.tensor([pack.ids], device=device)
    depths = torch.tensor([pack.depths], device=device)
    output = model.base_model(input_ids=ids, position_ids=depths, use_cache=False, layout=layout)  # type: ignore[operator]
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def head_weight(model: nn.Module) -> Tensor:
    """The output embedding [V, H]; models that do more than multiply by it are refused."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    config = model.config
    for knob in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, knob, None) not in (None, 1, 1.0):
            raise PolicyError(f"models with {knob} are not supported; use a Llama, Qwen or Mistral kind of model")
    if getattr(head, "bias", None) is not None:
        raise PolicyError("models whose output head has a bias are not supported; use a Llama, Qwen or Mistral kind")
    weight: Tensor = head.weight
    return weight
