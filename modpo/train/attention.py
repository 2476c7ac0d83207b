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
from modpo.train.trie import Block, Pack, Span

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
    seen: Tensor  # bool [n, m+n], True where a query may see a key: all ancestors, part of its own block


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
        parts = tuple(_Part(b.start, b.stop, b.ancestors, _seen(b, device)) for b in pack.blocks)
        return cls(parts, max(pack.depths) + 1, keep)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Layout.attend`; the batch axis has length 1."""
        if self.keep:
            self.kept[layer] = (key[0], value[0])
        out: Tensor = _TrieAttention.apply(  # type: ignore[no-untyped-call]
            query[0], key[0], value[0], self.parts, scale
        )
        return out.unsqueeze(0)


def _seen(block: Block, device: torch.device) -> Tensor:
    owner = torch.repeat_interleave(torch.arange(len(block.pieces)), torch.tensor(block.pieces))
    at = torch.arange(len(owner))
    own = (owner[:, None] == owner[None, :]) & (at[:, None] >= at[None, :])
    above = sum(stop - start for start, stop in block.ancestors)
    return torch.cat([torch.ones(len(owner), above, dtype=torch.bool), own], dim=1).to(device)


def _gather(source: Tensor, part: _Part) -> Tensor:
    """Keys or values [Hkv, m+n, D] that a block sees: ancestors first, then the block itself."""
    spans = (*part.ancestors, (part.start, part.stop))
    pieces = [source[:, start:stop] for start, stop in spans]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


class _TrieAttention(torch.autograd.Function):
    """softmax(q k^T * scale) v over the keys each block sees; scores are recomputed in the backward.

    Query heads [Hkv * g] are held as [Hkv, g], so that the g heads of a group share their keys unrepeated.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: tuple[_Part, ...], scale: float) -> Tensor:
        heads, (_, length, dim) = key.shape[0], query.shape
        grouped = query.reshape(heads, -1, length, dim)
        out = torch.empty_like(grouped)
        for part in parts:
            at = slice(part.start, part.stop)
            keys, values = _gather(key, part)[:, None], _gather(value, part)[:, None]
            shape = (heads, grouped.shape[1], keys.shape[2], dim)
            out[:, :, at] = nn.functional.scaled_dot_product_attention(
                grouped[:, :, at], keys.expand(shape), values.expand(shape), attn_mask=part.seen, scale=scale
            )
        ctx.save_for_backward(grouped, key, value)
        ctx.parts, ctx.scale = parts, scale
        return out.view(query.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value = ctx.saved_tensors
        grad = grads[0].reshape(query.shape)
        grad_q, grad_k, grad_v = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for part in ctx.parts:
            at = slice(part.start, part.stop)
            keys, values = _gather(key, part), _gather(value, part)
            asked = (query[:, :, at] * ctx.scale).flatten(1, 2)
            up = grad[:, :, at].flatten(1, 2)
            weights = _weights(asked, keys, part)
            slope = torch.ops.aten._softmax_backward_data(
                torch.matmul(up, values.transpose(1, 2)).float(), weights, -1, torch.float32
            ).to(key.dtype)
            to_queries = torch.matmul(slope, keys).mul_(ctx.scale)
            grad_q[:, :, at] = to_queries.view(query[:, :, at].shape)
            _scatter(grad_k, torch.matmul(slope.transpose(1, 2), asked), part)
            _scatter(grad_v, torch.matmul(weights.to(value.dtype).transpose(1, 2), up), part)
        return grad_q.flatten(0, 1), grad_k, grad_v, None, None


def _weights(asked: Tensor, keys: Tensor, part: _Part) -> Tensor:
    """Attention weights [Hkv, g*n, m+n] in fp32 of scaled queries [Hkv, g*n, D]."""
    scores = torch.matmul(asked, keys.transpose(1, 2)).float()
    size = part.stop - part.start
    own = scores.unflatten(1, (-1, size))[..., -size:]
    own.masked_fill_(~part.seen[:, -size:], -torch.inf)
    return torch.softmax(scores, dim=-1)


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
    attention_mask: Tensor | None,  # noqa: ARG001 - the layout says what is seen
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
