import pytest
import torch
from torch import nn

from modpo.errors import PolicyError
from modpo.train import trie
from modpo.train.attention import NAME, TrieLayout, attend, register
from modpo.train.trie import Row, pack_rows
from tests.oracle import cases

HEADS, KEYS, DIM = 4, 2, 6


def dense_mask(pack):
    """bool [L, L]: what a query sees, from the rows' paths rather than from the blocks."""
    mask = torch.zeros(len(pack.ids), len(pack.ids), dtype=torch.bool)
    for spans in pack.spans:
        path = [at for start, stop in spans for at in range(start, stop)]
        for depth, at in enumerate(path):
            mask[at, path[: depth + 1]] = True
    return mask


def dense(query, key, value, mask, scale):
    repeat = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(repeat, dim=1) for part in (key, value))
    scores = (query @ key.transpose(2, 3)) * scale
    return torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1) @ value


def tensors(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, HEADS, length, DIM), (1, KEYS, length, DIM), (1, KEYS, length, DIM)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("block", [1, 3, 256])
@pytest.mark.parametrize("case", ["ragged", "multi_turn", "single_token", "duplicates", "one_is_a_prefix"])
def test_output_and_gradients_are_those_of_a_dense_mask(case, block, monkeypatch):
    monkeypatch.setattr(trie, "BLOCK_TOKENS", block)
    (pack,) = pack_rows(cases()[case], 10_000)
    inputs = tensors(len(pack.ids))
    layout = TrieLayout.of(pack, torch.device("cpu"))
    found = layout.attend(0, *inputs, 0.3)
    wanted = dense(*inputs, dense_mask(pack), 0.3)
    assert torch.allclose(found, wanted, atol=1e-5)
    up = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
    for mine, theirs in zip(
        torch.autograd.grad(found, inputs, up), torch.autograd.grad(wanted, inputs, up), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_prefill_keeps_the_keys_and_values_of_each_layer():
    (pack,) = pack_rows([Row((1, 2, 3), ())], 10)
    query, key, value = tensors(3)
    layout = TrieLayout.of(pack, torch.device("cpu"), keep=True)
    layout.attend(1, query, key, value, 1.0)
    assert list(layout.kept) == [1]
    assert torch.equal(layout.kept[1][0], key[0])
    assert torch.equal(layout.kept[1][1], value[0])


def asked(layout, **options):
    layer = nn.Module()
    layer.layer_idx = 0
    return attend(layer, *tensors(5), None, layout=layout, **options)


def layout_of(length):
    (pack,) = pack_rows([Row(tuple(range(length)), ())], 100)
    return TrieLayout.of(pack, torch.device("cpu"))


def test_the_scale_is_the_head_dimensions_unless_it_is_given():
    out, weights = asked(layout_of(5))
    given, _ = asked(layout_of(5), scaling=DIM**-0.5)
    other, _ = asked(layout_of(5), scaling=1.0)
    assert weights is None
    assert out.shape == (1, 5, HEADS, DIM)
    assert torch.equal(out, given)
    assert not torch.allclose(out, other)


def test_a_sliding_window_is_refused_only_when_a_row_is_longer():
    asked(layout_of(5), sliding_window=5)
    with pytest.raises(PolicyError, match=r"sliding window \(4\).*rows of 5 tokens"):
        asked(layout_of(5), sliding_window=4)


def test_a_soft_cap_is_refused():
    with pytest.raises(PolicyError, match="soft cap"):
        asked(layout_of(5), softcap=30.0)


def test_a_model_of_a_policy_cannot_be_called_past_modpo():
    with pytest.raises(PolicyError, match="load it again for other uses"):
        asked(None)


def test_registering_twice_is_harmless():
    assert register() == register() == NAME
