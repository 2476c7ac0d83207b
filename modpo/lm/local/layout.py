"""Attention of a growing batch: what every prompt begins with is kept once, what the samples of a prompt
share once per prompt, and only sampled tokens per sample. One softmax spans the three tiers of keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modpo.train.trie import Pack, Span

Keys = tuple[Tensor, Tensor]


@dataclass(slots=True)
class DecodeLayout:
    """Attention of one new token per row over its three tiers of keys.

    B rows belong to U prompts; `slots` [U, R] numbers each prompt's rows (padded with row 0) and
    `place` [B] finds a row's slot in the flattened [U * R].
    """

    common: dict[int, Keys]  # [Hkv, L0, D]
    own: dict[int, Keys]  # [U, Hkv, M, D], zero-padded
    own_hidden: Tensor  # bool [U, M], True where padded
    slots: Tensor
    place: Tensor
    longest: int
    capacity: int
    step: int = 0
    new: dict[int, Keys] = field(default_factory=dict)  # [B, Hkv, capacity, D]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Layout.attend`; L is 1."""
        rows, heads = key.shape[:2]
        q = query.reshape(rows, heads, -1, query.shape[-1]) * scale  # [B, Hkv, g, D]
        keys, values = self._append(layer, key, value)
        scores = [self._common_scores(layer, q), self._own_scores(layer, q), torch.matmul(q, keys.transpose(2, 3))]
        sizes = [part.shape[-1] for part in scores]
        weights = torch.softmax(torch.cat(scores, dim=-1).float(), dim=-1).to(q.dtype).split(sizes, dim=-1)
        out = torch.matmul(weights[2], values)
        out += self._common_values(layer, weights[0])
        out += self._own_values(layer, weights[1])
        shaped: Tensor = out.view(query.shape)
        return shaped

    def _append(self, layer: int, key: Tensor, value: Tensor) -> Keys:
        if layer not in self.new:
            shape = (key.shape[0], key.shape[1], self.capacity, key.shape[3])
            self.new[layer] = (key.new_empty(shape), value.new_empty(shape))
        keys, values = self.new[layer]
        keys[:, :, self.step] = key[:, :, 0]
        values[:, :, self.step] = value[:, :, 0]
        return keys[:, :, : self.step + 1], values[:, :, : self.step + 1]

    def _common_scores(self, layer: int, q: Tensor) -> Tensor:
        rows, heads, group, _ = q.shape
        flat = q.transpose(0, 1).flatten(1, 2)  # [Hkv, B*g, D]
        return torch.matmul(flat, self.common[layer][0].transpose(1, 2)).view(heads, rows, group, -1).transpose(0, 1)

    def _common_values(self, layer: int, weights: Tensor) -> Tensor:
        rows, heads, group, _ = weights.shape
        flat = weights.transpose(0, 1).flatten(1, 2)
        return torch.matmul(flat, self.common[layer][1]).view(heads, rows, group, -1).transpose(0, 1)

    def _own_scores(self, layer: int, q: Tensor) -> Tensor:
        _, heads, group, _ = q.shape
        keys = self.own[layer][0]
        scores = torch.matmul(self._by_prompt(q), keys.transpose(2, 3))  # [U, Hkv, R*g, M]
        scores = scores.masked_fill(self.own_hidden[:, None, None], -torch.inf)
        return self._by_row(scores, heads, group)

    def _own_values(self, layer: int, weights: Tensor) -> Tensor:
        heads, group = weights.shape[1:3]
        return self._by_row(torch.matmul(self._by_prompt(weights), self.own[layer][1]), heads, group)

    def _by_prompt(self, per_row: Tensor) -> Tensor:
        """[B, Hkv, g, X] -> [U, Hkv, R*g, X]."""
        return per_row[self.slots].transpose(1, 2).flatten(2, 3)

    def _by_row(self, per_prompt: Tensor, heads: int, group: int) -> Tensor:
        """[U, Hkv, R*g, X] -> [B, Hkv, g, X]."""
        prompts = per_prompt.shape[0]
        split = per_prompt.view(prompts, heads, -1, group, per_prompt.shape[-1]).transpose(1, 2)
        rows: Tensor = split.flatten(0, 1)[self.place]
        return rows

    def shrink(self, kept: Tensor, owners: Tensor) -> Tensor:
        """Keep only the rows `kept`; `owners` [B] names their prompts. Returns the owners renumbered."""
        renumbered: Tensor
        prompts, renumbered = torch.unique(owners, return_inverse=True)
        if len(prompts) < len(self.own_hidden):
            self.own = {layer: (k[prompts], v[prompts]) for layer, (k, v) in self.own.items()}
            self.own_hidden = self.own_hidden[prompts]
        self.new = {layer: (k[kept], v[kept]) for layer, (k, v) in self.new.items()}
        self.slots, self.place = _slots(renumbered)
        return renumbered


def _slots(owners: Tensor) -> tuple[Tensor, Tensor]:
    """Slots [U, R] and places [B] of rows with owners [B] in 0..U-1."""
    counts = torch.bincount(owners)
    width = int(counts.max())
    slots = torch.zeros(len(counts), width, dtype=torch.long)
    place = torch.zeros(len(owners), dtype=torch.long)
    filled = [0] * len(counts)
    for row, owner in enumerate(owners.tolist()):
        slots[owner, filled[owner]] = row
        place[row] = owner * width + filled[owner]
        filled[owner] += 1
    return slots.to(owners.device), place.to(owners.device)


def decode_layout(
    pack: Pack, kept: dict[int, Keys], lengths: list[int], shared: int, capacity: int
) -> tuple[DecodeLayout, Tensor]:
    """Lay out the decoding of a prefilled pack.

    Args:
        pack: one row per completion; equal prompts are neighbours.
        kept: keys and values [Hkv, L, D] of the pack, per layer.
        lengths: prompt length of each packed row.
        shared: length of the prefix that all prompts share.
        capacity: most tokens a completion may get.

    Returns:
        The layout, and the owner (prompt number) of each row [B].
    """
    device = next(iter(kept.values()))[0].device
    prompts = list(dict.fromkeys(pack.spans))
    owners = torch.tensor([prompts.index(spans) for spans in pack.spans], device=device)
    size_of = dict(zip(pack.spans, lengths, strict=True))
    own_sizes = torch.tensor([size_of[spans] - shared for spans in prompts], device=device)
    width = max(int(own_sizes.max()), 1)
    common, own = {}, {}
    for layer, (keys, values) in kept.items():
        common[layer] = (keys[:, :shared].clone(), values[:, :shared].clone())
        own[layer] = (_pad(keys, prompts, shared, width), _pad(values, prompts, shared, width))
    hidden = torch.arange(width, device=device)[None, :] >= own_sizes[:, None]
    slots, place = _slots(owners)
    return DecodeLayout(common, own, hidden, slots, place, max(lengths) + capacity, capacity), owners


def _pad(source: Tensor, prompts: Sequence[tuple[Span, ...]], shared: int, width: int) -> Tensor:
    """What each prompt does not share, of keys or values [Hkv, L, D]: [U, Hkv, width, D], zero-padded."""
    padded = source.new_zeros(len(prompts), source.shape[0], width, source.shape[2])
    for at, spans in enumerate(prompts):
        piece = torch.cat([source[:, start:stop] for start, stop in spans], dim=1)[:, shared:]
        padded[at, :, : piece.shape[1]] = piece
    return padded
