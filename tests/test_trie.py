import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modpo.train import trie
from modpo.train.trie import Block, Row, pack_rows, shared_prefix, trie_tokens

ROWS = [Row((1, 2, 3), (4, 5)), Row((1, 2, 3), (4, 6)), Row((1, 2, 9), (7,))]


def test_the_hand_counted_trie():
    # 1 2 3 4 5, then 6 beside 5, then 9 7 beside 3 4: eight tokens instead of fourteen
    assert trie_tokens(ROWS) == 8
    assert sum(len(row.ids) for row in ROWS) == 14


def test_every_field_of_the_hand_drawn_pack():
    (pack,) = pack_rows(ROWS, 100)
    assert pack.ids == [1, 2, 3, 4, 5, 6, 9, 7]
    assert pack.depths == [0, 1, 2, 3, 4, 4, 2, 3]
    assert pack.blocks == (
        Block(0, 5, (), (5,)),
        Block(5, 6, ((0, 4),), (1,)),
        Block(6, 8, ((0, 2),), (2,)),
    )
    # token 4 after 1 2 3 is one target of two rows
    assert (pack.sources, pack.targets) == ([2, 3, 3, 6], [4, 5, 6, 7])
    assert pack.rows == (0, 1, 2)
    assert pack.picks == ((0, 1), (0, 2), (3,))
    assert pack.spans == (((0, 5),), ((0, 4), (5, 6)), ((0, 2), (6, 8)))


def test_turns_merge_only_where_the_ids_really_extend_each_other():
    # the second turn's prompt begins with all of the first turn, answer included
    first, second = Row((1, 2), (3, 4)), Row((1, 2, 3, 4, 5), (6,))
    (pack,) = pack_rows([first, second], 100)
    assert pack.ids == [1, 2, 3, 4, 5, 6]
    # the first turn's answer is a target of its own row alone: 3 after 2, 4 after 3; the second's is 6 after 5
    assert (pack.sources, pack.targets) == ([1, 2, 4], [3, 4, 6])
    assert pack.picks == ((0, 1), (2,))
    # the same text, tokenised anew with another id for 4: nothing after 3 is shared
    (pack,) = pack_rows([first, Row((1, 2, 3, 9, 5), (6,))], 100)
    assert pack.ids == [1, 2, 3, 4, 9, 5, 6]
    assert pack.spans == (((0, 4),), ((0, 3), (4, 7)))


def test_a_trie_that_is_too_large_is_split_by_subtree():
    packs = pack_rows(ROWS, 6)
    assert [pack.rows for pack in packs] == [(0, 1), (2,)]
    assert [pack.ids for pack in packs] == [[1, 2, 3, 4, 5, 6], [1, 2, 9, 7]]


def test_a_row_longer_than_a_pack_has_one_of_its_own():
    assert [pack.rows for pack in pack_rows(ROWS, 1)] == [(0,), (1,), (2,)]


def test_siblings_share_a_block_until_it_is_full(monkeypatch):
    monkeypatch.setattr(trie, "BLOCK_TOKENS", 4)
    (pack,) = pack_rows([Row((1, 2), (at, at)) for at in (3, 4, 5, 6)], 100)
    # 1 2 3 3 | 4 4 5 5 | 6 6: four queries at most stand in a block, and siblings do not see each other
    assert pack.blocks == (
        Block(0, 4, (), (4,)),
        Block(4, 8, ((0, 2),), (2, 2)),
        Block(8, 10, ((0, 2),), (2,)),
    )


def test_a_long_segment_is_cut_into_blocks(monkeypatch):
    monkeypatch.setattr(trie, "BLOCK_TOKENS", 4)
    (pack,) = pack_rows([Row(tuple(range(9)), (1,))], 100)
    assert pack.blocks == (Block(0, 4, (), (4,)), Block(4, 8, ((0, 4),), (4,)), Block(8, 10, ((0, 8),), (2,)))


def test_duplicates_cost_nothing_and_are_picked_twice():
    (pack,) = pack_rows([ROWS[0], ROWS[0]], 100)
    assert len(pack.ids) == 5
    assert pack.picks == ((0, 1), (0, 1))


def test_no_rows_no_packs():
    assert pack_rows([], 10) == []
    assert trie_tokens([]) == 0


@pytest.mark.parametrize(
    ("left", "right", "length"), [((), (1,), 0), ((1, 2), (1, 2), 2), ((1, 2, 3), (1, 9), 1), ((2,), (1,), 0)]
)
def test_shared_prefix(left, right, length):
    assert shared_prefix(left, right) == length


def seen_by(blocks):
    """Pack positions that each query sees, as the blocks say."""
    seen = {}
    for block in blocks:
        above = {at for start, stop in block.ancestors for at in range(start, stop)}
        start = block.start
        for size in block.pieces:
            for at in range(start, start + size):
                seen[at] = above | set(range(start, at + 1))
            start += size
        assert start == block.stop
    return seen


rows_of_few_tokens = st.lists(
    st.builds(
        lambda prompt, completion: Row(tuple(prompt), tuple(completion)),
        st.lists(st.integers(0, 1), min_size=1, max_size=9),
        st.lists(st.integers(0, 1), max_size=9),
    ),
    max_size=9,
)


@settings(deadline=None, max_examples=150, database=None)
@given(rows=rows_of_few_tokens, max_tokens=st.integers(1, 40), block=st.integers(1, 6))
def test_every_row_lies_whole_in_one_pack_and_sees_its_own_path(rows, max_tokens, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trie, "BLOCK_TOKENS", block)
        packs = pack_rows(rows, max_tokens)
    assert sorted(row for pack in packs for row in pack.rows) == list(range(len(rows)))
    for pack in packs:
        assert len(pack.ids) <= max_tokens or len({rows[row].ids for row in pack.rows}) == 1
        assert [b.start for b in pack.blocks] == [0, *(b.stop for b in pack.blocks)][: len(pack.blocks)]
        assert pack.blocks[-1].stop == len(pack.ids)
        assert all(stop - start <= block for start, stop in ((b.start, b.stop) for b in pack.blocks))
        seen = seen_by(pack.blocks)
        for row, picks, spans in zip(pack.rows, pack.picks, pack.spans, strict=True):
            path = [at for start, stop in spans for at in range(start, stop)]
            assert tuple(pack.ids[at] for at in path) == rows[row].ids
            assert [pack.depths[at] for at in path] == list(range(len(path)))
            for depth, at in enumerate(path):
                assert seen[at] == set(path[: depth + 1])
            assert tuple(pack.targets[n] for n in picks) == rows[row].completion
            assert [pack.sources[n] for n in picks] == path[len(rows[row].prompt) - 1 : -1][: len(picks)]
        assert len(set(zip(pack.sources, pack.targets, strict=True))) == len(pack.targets)
    assert trie_tokens(rows) == len({row.ids[:n] for row in rows for n in range(1, len(row.ids) + 1)})
