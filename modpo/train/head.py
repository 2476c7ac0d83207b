"""Token logprobs from hidden states, in chunks over positions: the [N, V] logits never exist at once."""

from typing import Any

import torch
from torch import Tensor

CHUNK = 256  # positions per chunk: 50 MB of fp32 logits at a vocabulary of 49k


class _TokenLogprobs(torch.autograd.Function):
    """lp_n = log softmax(h_n W^T / T)[y_n].

    Its gradient by h_n is (W[y_n] - sum_v p_v W[v]) / T, known as soon as the logits are, so it is
    computed in the forward pass and scaled in the backward: the logits are made once and dropped.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logprobs, entropies, slopes = [], [], []
        for rows, wanted in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
            logits = torch.nn.functional.linear(rows, weight).float().div_(temperature)
            lse = torch.logsumexp(logits, dim=-1)
            chosen = logits.gather(1, wanted[:, None]).squeeze(1)
            probs = logits.clone().sub_(lse[:, None]).exp_()
            logprobs.append(chosen - lse)
            entropies.append(lse - torch.einsum("nv,nv->n", probs, logits))
            if ctx.needs_input_grad[0]:
                mean = torch.matmul(probs.to(weight.dtype), weight)
                slopes.append((weight[wanted] - mean).div_(temperature))
        if slopes:
            ctx.save_for_backward(torch.cat(slopes))
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return grads[0][:, None].to(slopes.dtype) * slopes, None, None, None


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprob of each target and entropy of its distribution, both fp32, in nats.

    Args:
        hidden: [N, H] states that predict the targets.
        weight: [V, H] output embedding; not trained.
        targets: [N] token ids.
        temperature: the logits are divided by it (> 0).
    """
    if not len(targets):
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return empty, empty
    found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperature
    )
    return found
