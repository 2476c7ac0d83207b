"""Batched decoding: prompts are prefilled as a trie, then all completions grow one token at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from modpo.lm.local.layout import DecodeLayout, decode_layout
from modpo.lm.local.linear import linear
from modpo.lm.sampler import Completion, SampleRequest
from modpo.records import Finish
from modpo.train.attention import TrieLayout
from modpo.train.trainer import head_weight, hidden_states
from modpo.train.trie import Pack, Row, pack_rows, shared_prefix

PREFILL_TOKENS = 16384  # bound on one prefill; a batch over it is decoded in parts
SHRINK_AT = 0.9  # finished rows are dropped once no more than this share still runs


class _Rows:
    """The growing completions of a batch, their draws and their ends."""

    def __init__(self, requests: Sequence[SampleRequest], ends: frozenset[int], tokenizer: PreTrainedTokenizerBase):
        self.requests = requests
        self.ends = ends
        self.tokenizer = tokenizer
        self.ids: list[list[int]] = [[] for _ in requests]
        self.logprobs: list[list[float]] = [[] for _ in requests]
        self.finish: list[Finish | None] = [None] * len(requests)
        self.capacity = max(request.max_tokens for request in requests)
        # each request draws from its own generator: the mix of a batch never changes a draw
        self.draws = torch.zeros(len(requests), self.capacity, dtype=torch.float64)
        for row, request in enumerate(requests):
            generator = torch.Generator().manual_seed(request.seed)
            self.draws[row, : request.max_tokens] = torch.rand(
                request.max_tokens, generator=generator, dtype=torch.float64
            )
        self.temperatures = torch.tensor([request.temperature for request in requests])

    def add(self, active: list[int], chosen: list[int], logprobs: list[float]) -> None:
        """Append a token to each active row and note which rows end."""
        for row, token, logprob in zip(active, chosen, logprobs, strict=True):
            request, ids = self.requests[row], self.ids[row]
            ids.append(token)
            self.logprobs[row].append(logprob)
            if token in self.ends or self._marked(ids, request.stop):
                self.finish[row] = "stop"
            elif len(ids) >= request.max_tokens:
                self.finish[row] = "length"

    def _marked(self, ids: list[int], stop: tuple[str, ...]) -> bool:
        if not stop:
            return False
        reach = max(len(text.encode()) for text in stop)  # a token is at least one byte
        tail = self.tokenizer.decode(ids[-reach:], skip_special_tokens=False)
        return any(text in tail for text in stop)

    def completions(self) -> list[Completion]:
        """The finished rows."""
        return [
            Completion(tuple(ids), tuple(logprobs), finish or "length", self._text(ids))
            for ids, logprobs, finish in zip(self.ids, self.logprobs, self.finish, strict=True)
        ]

    def _text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


def choose(logits: Tensor, temperatures: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the distribution's cumulative sum.

    Args:
        logits: [B, V].
        temperatures: [B]; 0 takes the most likely token, and its logprob is the one at temperature 1.
        draws: [B] uniform in [0, 1), fp64.

    Returns:
        Token ids [B] and their logprobs [B], fp32, in nats.
    """
    greedy = temperatures == 0
    scaled = logits.float() / torch.where(greedy, torch.ones_like(temperatures), temperatures)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    chosen = logprobs.argmax(dim=-1)
    if not bool(greedy.all()):
        mass = logprobs.exp().cumsum(dim=-1)
        wanted = (draws.to(mass.device) * mass[:, -1].double()).float()
        drawn = torch.searchsorted(mass, wanted[:, None], right=True).squeeze(1).clamp_(max=mass.shape[1] - 1)
        chosen = torch.where(greedy, chosen, drawn)
    return chosen, logprobs.gather(1, chosen[:, None]).squeeze(1)


@torch.inference_mode()
def decode(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int], requests: Sequence[SampleRequest]
) -> list[Completion]:
    """Sample a completion for each request, all from the weights that `model` holds now.

    Args:
        model: causal LM with modpo's attention.
        tokenizer: turns ids into text to look for the requests' `stop` texts.
        ends: token ids that end a completion.
        requests: B requests; `adapter` and `version` are not looked at.
    """
    found: list[Completion | None] = [None] * len(requests)
    for pack in pack_rows([Row(request.prompt_ids, ()) for request in requests], PREFILL_TOKENS):
        rows = _Rows([requests[at] for at in pack.rows], ends, tokenizer)
        _grow(model, pack, rows)
        for at, completion in zip(pack.rows, rows.completions(), strict=True):
            found[at] = completion
    return [completion for completion in found if completion is not None]


def _grow(model: nn.Module, pack: Pack, rows: _Rows) -> None:
    device = next(model.parameters()).device
    prompts = [request.prompt_ids for request in rows.requests]
    prefill = TrieLayout.of(pack, device, keep=True)
    last = torch.tensor([spans[-1][1] - 1 for spans in pack.spans], device=device)
    hidden = hidden_states(model, pack, prefill)[last]
    shared = shared_prefix(prompts[0], prompts[-1])  # packed rows are sorted
    layout, owners = decode_layout(pack, prefill.kept, [len(ids) for ids in prompts], shared, rows.capacity)
    prefill.kept.clear()
    depths = torch.tensor([len(ids) for ids in prompts], device=device)
    active = list(range(len(prompts)))
    for step in range(rows.capacity):
        chosen, logprobs = _sample(model, hidden, rows, active, step)
        running = [at for at, row in enumerate(active) if rows.finish[row] is None]
        rows.add([active[at] for at in running], chosen[running].tolist(), logprobs[running].tolist())
        running = [at for at, row in enumerate(active) if rows.finish[row] is None]
        if not running:
            return
        if len(running) <= SHRINK_AT * len(active):
            kept = torch.tensor(running, device=device)
            owners = layout.shrink(kept, owners[kept])
            chosen, depths, active = chosen[kept], depths[kept], [active[at] for at in running]
        hidden = _advance(model, layout, chosen, depths + step)
        layout.step += 1


def _sample(model: nn.Module, hidden: Tensor, rows: _Rows, active: list[int], step: int) -> tuple[Tensor, Tensor]:
    logits = linear(hidden, head_weight(model))
    return choose(logits, rows.temperatures[active].to(logits.device), rows.draws[active, step])


def _advance(model: nn.Module, layout: DecodeLayout, tokens: Tensor, depths: Tensor) -> Tensor:
    """Last hidden states [B, H] after one more token per row."""
    output = model.base_model(  # type: ignore[operator]
        input_ids=tokens[:, None], position_ids=depths[:, None], use_cache=False, layout=layout
    )
    hidden: Tensor = output.last_hidden_state[:, 0]
    return hidden
