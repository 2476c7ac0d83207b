import pytest
import torch
from torch import nn
from torch.nn import functional

from modpo.lm.local.linear import MOST_ROWS, FewRowsLinear, expect_few_rows, linear
from tests.tiny import tiny_model


@pytest.mark.parametrize("shape", [(1, 6), (3, 6), (MOST_ROWS, 6), (MOST_ROWS + 1, 6), (4, 5, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_a_linear_map(shape, dtype, biased):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(shape), torch.randn(7, 6), torch.randn(7)
    parts = [part.to(dtype) for part in ((x, weight, bias) if biased else (x, weight))]
    found = linear(*parts)
    assert found.shape == (*shape[:-1], 7)
    assert found.is_contiguous()
    torch.testing.assert_close(found, functional.linear(*parts))


def test_layers_keep_their_weights():
    model = tiny_model()
    ids = torch.arange(8)[None]
    expected, weights = model(ids).logits, [parameter.data_ptr() for parameter in model.parameters()]
    expect_few_rows(model)
    assert {type(layer) for layer in model.modules() if isinstance(layer, nn.Linear)} == {FewRowsLinear}
    assert [parameter.data_ptr() for parameter in model.parameters()] == weights
    torch.testing.assert_close(model(ids).logits, expected)
