"""Attention over a trie pack, block by block, with a backward pass that stores no score matrix.

Registered with transformers as attention implementation ``modpo``: a model forward is given a `layout`
keyword, and every layer asks it to attend. The trie layout below serves training and prefill; the
sampler's decode layout lives with the sampler.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from modpo.errors import PolicyError
from modpo.train.trie import Pack, Span

NAME = "modpo"


class Layout(Protocol):
    """Knows which keys each query of a forward pass sees."""

    @property
    def longest(self) -> int:
        """Most keys a query sees."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention output [B, H, L, D] for query [B, H, L, D] and key, value [B, Hkv, L, D]."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A block with its mask: ancestors are seen by all, pieces causally by themselves."""

    start: int
    stop: int
    ancestors: tuple[Span, ...]
    hidden: Tensor  # bool [n, n], True where a query must not see a key of its own block


@dataclass(slots=True)
class TrieLayout:
    """Attention by blocks of a pack; keeps keys and values per layer when `keep` is set (prefill)."""

    parts: tuple[_Part, ...]
    longest: int
    keep: bool = False
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, pack: Pack, device: torch.device, keep: bool = False) -> "TrieLayout":
        """Lay out a pack on a device."""
        parts = tuple(
            _Part(block.start, block.stop, block.ancestors, _hidden(block.pieces, device)) for block in pack.blocks
        )
        return cls(parts, max(pack.depths) + 1, keep)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Layout.attend`; the batch axis has length 1."""
        if self.keep:
            self.kept[layer] = (key[0], value[0])
        out: Tensor = _TrieAttention.apply(query[0], key[0], value[0], self.parts, scale)
        return out.unsqueeze(0)


def _hidden(pieces: tuple[int, ...], device: torch.device) -> Tensor:
    owner = torch.repeat_interleave(torch.arange(len(pieces)), torch.tensor(pieces))
    at = torch.arange(len(owner))
    seen = (owner[:, None] == owner[None, :]) & (at[:, None] >= at[None, :])
    return ~seen.to(device)


def _gather(source: Tensor, part: _Part) -> Tensor:
    """Keys or values [Hkv, m+n, D] that a block sees: ancestors first, then the block itself."""
    spans = (*part.ancestors, (part.start, part.stop))
    pieces = [source[:, start:stop] for start, stop in spans]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _scores(query: Tensor, keys: Tensor, part: _Part, scale: float) -> Tensor:
    """Masked scores [Hkv, g, n, m+n] in fp32 for query [Hkv, g, n, D]."""
    heads, group, size, dim = query.shape
    scores = torch.matmul(query.reshape(heads, group * size, dim), keys.transpose(1, 2))
    scores = scores.view(heads, group, size, -1).float().mul_(scale)
    scores[..., scores.shape[-1] - size :].masked_fill_(part.hidden, -torch.inf)
    return scores


class _TrieAttention(torch.autograd.Function):
    """softmax(q k^T * scale) v over the keys each block sees; scores are recomputed in the backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: tuple[_Part, ...], scale: float) -> Tensor:
        heads, (_, length, dim) = key.shape[0], query.shape
        grouped = query.reshape(heads, -1, length, dim)
        out = torch.empty_like(grouped)
        lse = torch.empty(grouped.shape[:3], dtype=torch.float32, device=query.device)
        for part in parts:
            at = slice(part.start, part.stop)
            scores = _scores(grouped[:, :, at], _gather(key, part), part, scale)
            lse[:, :, at] = part_lse = torch.logsumexp(scores, dim=-1)
            weights = scores.sub_(part_lse.unsqueeze(-1)).exp_().to(value.dtype)
            out[:, :, at] = torch.matmul(weights.flatten(1, 2), _gather(value, part)).view_as(out[:, :, at])
        ctx.save_for_backward(grouped, key, value, out, lse)
        ctx.parts, ctx.scale = parts, scale
        return out.view(query.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, lse = ctx.saved_tensors
        grad = grads[0].reshape(out.shape)
        grad_q, grad_k, grad_v = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        delta = (grad.float() * out.float()).sum(-1)
        for part in ctx.parts:
            at = slice(part.start, part.stop)
            keys, values = _gather(key, part), _gather(value, part)
            weights = _scores(query[:, :, at], keys, part, ctx.scale).sub_(lse[:, :, at].unsqueeze(-1)).exp_()
            up = grad[:, :, at].flatten(1, 2)
            flat = weights.flatten(1, 2).to(value.dtype)
            to_values = torch.matmul(flat.transpose(1, 2), up)
            slope = torch.matmul(up, values.transpose(1, 2)).view_as(weights).float()
            slope = slope.sub_(delta[:, :, at].unsqueeze(-1)).mul_(weights).mul_(ctx.scale)
            slope = slope.flatten(1, 2).to(key.dtype)
            grad_q[:, :, at] = torch.matmul(slope, keys).view_as(grad_q[:, :, at])
            to_keys = torch.matmul(slope.transpose(1, 2), query[:, :, at].flatten(1, 2))
            _scatter(grad_k, to_keys, part)
            _scatter(grad_v, to_values, part)
        return grad_q.flatten(0, 1), grad_k, grad_v, None, None


def _scatter(target: Tensor, update: Tensor, part: _Part) -> None:
    at = 0
    for start, stop in (*part.ancestors, (part.start, part.stop)):
        target[:, start:stop] += update[:, at : at + stop - start]
        at += stop - start


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention implementation transformers calls in every layer; returns [B, L, H, D]."""
    if layout is None:
        raise PolicyError("this model is a policy's: call it through modpo, or load it again for other uses")
    if softcap is not None or (sliding_window is not None and layout.longest > sliding_window):
        raise PolicyError(
            f"attention with a sliding window ({sliding_window}) or soft cap ({softcap}) is not supported "
            f"for rows of {layout.longest} tokens; use a model with full attention, or shorter prompts"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = layout.attend(int(module.layer_idx), query, key, value, scale)  # type: ignore[arg-type]
    return out.transpose(1, 2), None


def register() -> str:
    """Register the implementation with transformers and return its name."""
    AttentionInterface.register(NAME, attend)
    return NAME
