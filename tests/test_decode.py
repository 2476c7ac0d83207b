import pytest
import torch

from modpo.lm.local import decode as decode_module
from modpo.lm.local.decode import choose, decode
from modpo.lm.sampler import SampleRequest
from modpo.train.attention import register
from modpo.train.trie import Row
from tests.oracle import Oracle, random_ids
from tests.tiny import EOS, KINDS, tiny_model, tiny_tokenizer

HEAD = random_ids(12, 1)
NO_ENDS = frozenset()


def ask(prompt, seed=0, max_tokens=8, temperature=1.0, stop=()):
    return SampleRequest(prompt_ids=prompt, seed=seed, max_tokens=max_tokens, temperature=temperature, stop=stop)


def model_of(kind="llama"):
    model = tiny_model(kind)
    model.set_attn_implementation(register())
    return model


def answers(requests, kind="llama", ends=NO_ENDS):
    return decode(model_of(kind), tiny_tokenizer(), ends, requests)


def mixed(temperature=1.0):
    """Groups, a prompt that begins another, lone prompts, and unequal lengths."""
    prompts = [HEAD, (*HEAD, 5, 6), (*HEAD, 5, 7, 8), HEAD, (*HEAD, 5, 6), (*HEAD, 9)]
    return [
        ask(prompt, seed=at, max_tokens=3 + 5 * (at % 3), temperature=temperature) for at, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_a_full_forward(kind, temperature):
    requests = mixed(temperature)
    oracle = Oracle(kind, None)
    for request, found in zip(requests, answers(requests, kind), strict=True):
        assert len(found.ids) == len(found.logprobs) == request.max_tokens
        wanted = oracle.logprobs(Row(request.prompt_ids, found.ids), temperature)
        torch.testing.assert_close(torch.tensor(found.logprobs), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_what_generate_gives(kind):
    requests = mixed(temperature=0.0)
    plain = tiny_model(kind)
    oracle = Oracle(kind, None)
    for request, found in zip(requests, answers(requests, kind, frozenset({EOS})), strict=True):
        ids = torch.tensor([request.prompt_ids])
        wanted = plain.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=request.max_tokens
        )[0, ids.shape[1] :]
        assert found.ids == tuple(wanted.tolist())
        # at temperature 0 the logprob is the one at temperature 1
        wanted = oracle.logprobs(Row(request.prompt_ids, found.ids))
        torch.testing.assert_close(torch.tensor(found.logprobs), wanted, rtol=1e-4, atol=1e-4)


def test_draws_do_not_depend_on_the_batch_mix():
    requests = mixed()
    together = answers(requests)
    alone = [answers([request])[0] for request in requests]
    backwards = answers(requests[::-1])[::-1]
    assert [found.ids for found in together] == [found.ids for found in alone] == [found.ids for found in backwards]


def test_a_longer_neighbour_does_not_change_the_draws():
    short, long = ask(HEAD, seed=3, max_tokens=4), ask(HEAD, seed=3, max_tokens=30)
    first, second = answers([short, long])
    assert first.ids == second.ids[:4]


def test_a_seed_gives_its_answer_and_another_seed_another():
    same, again, other = answers([ask(HEAD, seed=1), ask(HEAD, seed=1), ask(HEAD, seed=2)])
    assert same.ids == again.ids
    assert same.ids != other.ids


def test_greedy_and_sampled_rows_share_a_batch():
    greedy, sampled = answers([ask(HEAD, temperature=0.0), ask(HEAD, seed=4)])
    assert greedy.ids == answers([ask(HEAD, temperature=0.0)])[0].ids
    assert sampled.ids == answers([ask(HEAD, seed=4)])[0].ids


def tokens_through(model, requests):
    """How many tokens each forward pass of the model takes."""
    seen = []
    handle = model.get_input_embeddings().register_forward_hook(lambda _m, given, _out: seen.append(given[0].numel()))
    decode(model, tiny_tokenizer(), NO_ENDS, requests)
    handle.remove()
    return seen


def test_a_group_of_identical_prompts_is_prefilled_once():
    requests = [ask(HEAD, seed=at, max_tokens=3) for at in range(8)]
    # the first token comes from the prefill; the last one needs no forward pass
    assert tokens_through(model_of(), requests) == [12, 8, 8]


def test_what_prompts_share_is_prefilled_once():
    requests = [ask((*HEAD, 5, at, at, at), seed=at, max_tokens=2) for at in (20, 20, 30, 40)]
    assert tokens_through(model_of(), requests) == [12 + 1 + 3 * 3, 4]


def test_rows_that_ended_are_dropped():
    requests = [ask(HEAD, seed=at, max_tokens=2 if at else 5) for at in range(8)]
    assert tokens_through(model_of(), requests) == [12, 8, 1, 1, 1]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_dropping_rows_early_or_never_changes_no_answer(share, monkeypatch):
    requests = [*mixed(), *(ask((*HEAD, at), seed=at, max_tokens=at) for at in range(2, 9))]
    wanted = [answers([request])[0].ids for request in requests]
    monkeypatch.setattr(decode_module, "SHRINK_AT", share)
    assert [found.ids for found in answers(requests, "llama")] == wanted


def test_a_batch_over_the_prefill_bound_is_decoded_in_parts(monkeypatch):
    requests = mixed()
    wanted = [found.ids for found in answers(requests)]
    monkeypatch.setattr(decode_module, "PREFILL_TOKENS", 14)
    assert [found.ids for found in answers(requests)] == wanted


def test_an_end_token_stops_and_is_kept():
    (free,) = answers([ask(HEAD, seed=2, max_tokens=30)])
    end = free.ids[6]
    at = free.ids.index(end)
    (found,) = answers([ask(HEAD, seed=2, max_tokens=30)], ends=frozenset({end}))
    assert (found.ids, found.finish) == (free.ids[: at + 1], "stop")
    assert free.finish == "length"


def printable_run(ids, size):
    """Where a run of `size` tokens first stands that are plain characters."""
    texts = [tiny_tokenizer().decode([at]) for at in ids]
    return next(at for at in range(len(ids)) if "".join(texts[at : at + size]).isascii() and at + size <= len(ids))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_stop_text_over_several_tokens_ends_the_completion_and_stays_in_it(size):
    (free,) = answers([ask(HEAD, seed=5, max_tokens=60)])
    at = printable_run(free.ids, size)
    text = tiny_tokenizer().decode(list(free.ids[at : at + size]))
    stop = ("never in there", text)
    found, other = answers([ask(HEAD, seed=5, max_tokens=60, stop=stop), ask(HEAD, seed=5, max_tokens=60)])
    assert found.finish == "stop"
    assert found.text.endswith(text)
    assert text not in found.text[:-1]
    assert found.ids == free.ids[: len(found.ids)]
    assert len(found.ids) <= at + size
    assert other.ids == free.ids


def test_an_end_on_the_last_token_allowed_is_a_stop():
    (free,) = answers([ask(HEAD, seed=2, max_tokens=7)])
    first = free.ids.index(free.ids[6])
    (found,) = answers([ask(HEAD, seed=2, max_tokens=first + 1)], ends=frozenset({free.ids[6]}))
    assert (len(found.ids), found.finish) == (first + 1, "stop")


def test_the_text_leaves_special_tokens_out():
    (free,) = answers([ask(HEAD, seed=2, max_tokens=1)])
    model = model_of()
    with torch.no_grad():  # an answer that is the end token at once
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
    (found,) = decode(model, tiny_tokenizer(), frozenset({0}), [ask(HEAD, temperature=0.0)])
    assert (found.ids, found.text, found.finish) == ((0,), "", "stop")
    assert free.ids != (0,)


def test_choose_inverts_the_distribution():
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
    draws = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    chosen, logprobs = choose(logits.expand(1000, 4), torch.ones(1000), draws)
    assert torch.bincount(chosen).tolist() == [100, 200, 300, 400]
    assert torch.allclose(logprobs, logits[0][chosen], atol=1e-6)


def test_choose_at_a_temperature_draws_from_the_sharpened_distribution():
    # squares of 1 and 3 at temperature one half: 1/10 and 9/10
    logits = torch.log(torch.tensor([[0.25, 0.75]])).expand(1000, 2)
    draws = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    chosen, _ = choose(logits, torch.full((1000,), 0.5), draws)
    assert torch.bincount(chosen).tolist() == [100, 900]


def test_choose_stays_in_the_vocabulary_at_the_ends():
    draws = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    chosen, logprobs = choose(torch.tensor([[-torch.inf, 0.0, 0.0]]).expand(2, 3), torch.ones(2), draws)
    assert chosen.tolist() == [1, 2]
    assert torch.isfinite(logprobs).all()
