"""Prefix-tree packing: all rows of a batch as one token sequence in which shared prefixes stand once.

Rows are sorted, so that neighbours share the longest prefixes. Each row then adds one *segment*, the
tokens it does not share with the row before; a token's ancestors are the prefix its segment hangs off.
Ten rows of one prompt cost one prompt. (Known in two-level form as Prefix Grouper, arXiv 2506.05433;
as trees as Tree Training, arXiv 2511.00413. This layout is our own.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

Span = tuple[int, int]

BLOCK_TOKENS = 128  # queries handled at once: bounds score matrices, and keys of siblings scored for nothing


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and a completion as token ids; only the completion is trained."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and completion, joined."""
        return self.prompt + self.completion


@dataclass(frozen=True, slots=True)
class Block:
    """Queries that see the same ancestors.

    Attributes:
        start, stop: the queries, a contiguous run of pack positions.
        ancestors: runs of pack positions every query sees.
        pieces: lengths of the sibling segments the block holds; a query also sees the earlier
            tokens of its own piece, never a sibling's.
    """

    start: int
    stop: int
    ancestors: tuple[Span, ...]
    pieces: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pack:
    """Rows packed into one sequence of L tokens.

    Attributes:
        ids: token ids, length L.
        depths: position of each token in its row (the position id), length L.
        blocks: how attention is computed, covering 0..L in order.
        sources: pack position whose hidden state predicts target n, length N (unique targets).
        targets: token id of target n, length N.
        rows: indices of the packed rows in the caller's order.
        picks: for each packed row, the target numbers of its completion, in order.
        spans: for each packed row, the runs of pack positions it lies on, in order.
    """

    ids: list[int]
    depths: list[int]
    blocks: tuple[Block, ...]
    sources: list[int]
    targets: list[int]
    rows: tuple[int, ...]
    picks: tuple[tuple[int, ...], ...]
    spans: tuple[tuple[Span, ...], ...]


def shared_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix of two id sequences."""
    size = min(len(left), len(right))
    for index in range(size):
        if left[index] != right[index]:
            return index
    return size


def pack_rows(rows: Sequence[Row], max_tokens: int) -> list[Pack]:
    """Pack rows into tries of at most `max_tokens` tokens each.

    A trie that is too large is split by subtree and the ancestors are repeated. A single row that is
    longer than `max_tokens` gets a pack of its own.

    Args:
        rows: R rows with non-empty prompts.
        max_tokens: bound on a pack's length.
    """
    order = sorted(range(len(rows)), key=lambda index: rows[index].ids)
    packs: list[Pack] = []
    chosen: list[int] = []
    size = 0
    for index in order:
        ids = rows[index].ids
        added = len(ids) - (shared_prefix(rows[chosen[-1]].ids, ids) if chosen else 0)
        if chosen and added and size + added > max_tokens:
            packs.append(_pack(rows, chosen))
            chosen, size, added = [], 0, len(ids)
        chosen.append(index)
        size += added
    if chosen:
        packs.append(_pack(rows, chosen))
    return packs


def trie_tokens(rows: Sequence[Row]) -> int:
    """Number of tokens of the trie of all rows."""
    return sum(len(pack.ids) for pack in pack_rows(rows, max_tokens=1 << 60))


def _pack(rows: Sequence[Row], chosen: list[int]) -> Pack:
    ids: list[int] = []
    depths: list[int] = []
    blocks: list[Block] = []
    targets: dict[Span, int] = {}
    picks, spans = [], []
    path: list[int] = []  # pack position of each token of the row at hand
    previous: tuple[int, ...] = ()
    for index in chosen:
        row = rows[index]
        current = row.ids
        kept = shared_prefix(previous, current)
        start = len(ids)
        ids.extend(current[kept:])
        depths.extend(range(kept, len(current)))
        _add_blocks(blocks, path[:kept], start, len(ids))
        path = path[:kept] + list(range(start, len(ids)))
        first = len(row.prompt)
        steps = [(path[at - 1], current[at]) for at in range(first, len(current))]
        picks.append(tuple(targets.setdefault(step, len(targets)) for step in steps))
        spans.append(_spans(path))
        previous = current
    return Pack(
        ids=ids,
        depths=depths,
        blocks=tuple(blocks),
        sources=[source for source, _ in targets],
        targets=[token for _, token in targets],
        rows=tuple(chosen),
        picks=tuple(picks),
        spans=tuple(spans),
    )


def _add_blocks(blocks: list[Block], ancestors: list[int], start: int, stop: int) -> None:
    """Add a segment: merged into the block before when they are siblings, cut when it is long."""
    if start == stop:
        return
    spans = _spans(ancestors)
    before = blocks[-1] if blocks else None
    if before and before.ancestors == spans and stop - before.start <= BLOCK_TOKENS:
        blocks[-1] = Block(before.start, stop, spans, (*before.pieces, stop - start))
        return
    for at in range(start, stop, BLOCK_TOKENS):
        end = min(at + BLOCK_TOKENS, stop)
        blocks.append(Block(at, end, _join(spans, (start, at)), (end - at,)))


def _spans(positions: list[int]) -> tuple[Span, ...]:
    spans: list[Span] = []
    for at in positions:
        if spans and spans[-1][1] == at:
            spans[-1] = (spans[-1][0], at + 1)
        else:
            spans.append((at, at + 1))
    return tuple(spans)


def _join(spans: tuple[Span, ...], extra: Span) -> tuple[Span, ...]:
    if extra[0] == extra[1]:
        return spans
    if spans and spans[-1][1] == extra[0]:
        return (*spans[:-1], (spans[-1][0], extra[1]))
    return (*spans, extra)
