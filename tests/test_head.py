import math

import pytest
import torch

from modpo.train import head
from modpo.train.head import token_logprobs


def parts(positions=11, hidden=5, vocabulary=13):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(positions, hidden, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, hidden, generator=generator)
    targets = torch.randint(vocabulary, (positions,), generator=generator)
    return states, weight, targets


@pytest.mark.parametrize("chunk", [1, 4, 11, 256])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_chunks_give_the_full_log_softmax_and_its_gradient(chunk, temperature, monkeypatch):
    monkeypatch.setattr(head, "CHUNK", chunk)
    states, weight, targets = parts()
    found, entropy = token_logprobs(states, weight, targets, temperature)
    full = torch.log_softmax(states @ weight.t() / temperature, dim=-1)
    wanted = full.gather(1, targets[:, None]).squeeze(1)
    assert torch.allclose(found, wanted, atol=1e-5)
    assert torch.allclose(entropy, -(full.exp() * full).sum(-1), atol=1e-5)
    up = torch.randn(len(targets), generator=torch.Generator().manual_seed(1))
    (mine,) = torch.autograd.grad(found, states, up)
    (theirs,) = torch.autograd.grad(wanted, states, up)
    assert torch.allclose(mine, theirs, atol=1e-5)


def test_a_hand_computed_case():
    # logits (ln 3, 0) at temperature 1: probabilities 3/4 and 1/4
    states = torch.tensor([[math.log(3.0)]], requires_grad=True)
    logprob, entropy = token_logprobs(states, torch.tensor([[1.0], [0.0]]), torch.tensor([1]), 1.0)
    assert logprob.item() == pytest.approx(math.log(0.25))
    assert entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    logprob.backward()
    assert states.grad.item() == pytest.approx(0.0 - 0.75)  # W[y] - sum p W


def test_entropy_of_a_uniform_distribution_is_log_v_and_carries_no_gradient():
    states = torch.zeros(3, 4, requires_grad=True)
    _, entropy = token_logprobs(states, torch.randn(8, 4), torch.tensor([0, 1, 2]), 1.0)
    assert entropy.tolist() == pytest.approx([math.log(8)] * 3)
    assert not entropy.requires_grad


def test_no_targets():
    logprobs, entropy = token_logprobs(torch.zeros(0, 4), torch.zeros(8, 4), torch.zeros(0, dtype=torch.long), 1.0)
    assert logprobs.shape == entropy.shape == (0,)


def test_a_bf16_model_still_gives_fp32_logprobs():
    states, weight, targets = parts()
    low = states.detach().bfloat16().requires_grad_()
    found, entropy = token_logprobs(low, weight.bfloat16(), targets, 1.0)
    assert found.dtype == entropy.dtype == torch.float32
    found.sum().backward()
    assert low.grad.dtype == torch.bfloat16
