import random
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest

from modpo.errors import ModpoError, PolicyError, SamplerError
from modpo.lm.local import engine
from modpo.lm.local.engine import LocalSampler
from modpo.lm.sampler import Completion, SampleRequest
from modpo.train.trie import Row
from tests.oracle import random_ids, tiny_trainer
from tests.tiny import EOS, tiny_model, tiny_tokenizer

HEAD = random_ids(10, 1)
NEVER = 1e6  # seconds: a test that waits for this hangs


def ask(at, **changes):
    request = SampleRequest(key=(at,), rollout=(0, at, 0), prompt_ids=HEAD, max_tokens=4, seed=at)
    return replace(request, **changes)


def made(**options):
    return LocalSampler(tiny_model(), tiny_tokenizer(), frozenset({EOS}), **options)


def started(sampler, requests):
    """A future of each request's answer, asked for by a thread of its own, in this order."""
    futures = []
    for request in requests:
        future = Future()
        futures.append(future)
        waiting = len(sampler._waiting)

        def work(request=request, future=future):
            try:
                future.set_result(sampler.sample(request))
            except ModpoError as error:
                future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        until(lambda before=waiting, future=future: len(sampler._waiting) > before or future.done() or sampler.taken)
    return futures


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.001)


@pytest.fixture
def batches(monkeypatch):
    """Keys of each batch that is decoded; nothing is computed."""
    seen = []

    def fake(model, tokenizer, ends, requests):
        seen.append([request.key[0] for request in requests])
        return [Completion((request.seed,), (-0.5,), "stop", "") for request in requests]

    monkeypatch.setattr(engine, "decode", fake)
    return seen


@pytest.fixture
def patient(monkeypatch):
    """Only full batches and waiting rollouts start one: time never does."""
    monkeypatch.setattr(engine, "LINGER_S", NEVER)


@pytest.fixture(autouse=True)
def notice_taken(monkeypatch):
    """`sampler.taken`: whether requests were ever taken from the queue."""
    monkeypatch.setattr(LocalSampler, "taken", False, raising=False)
    plain = LocalSampler._next_batch

    def noticing(self):
        batch = plain(self)
        self.taken = True
        return batch

    monkeypatch.setattr(LocalSampler, "_next_batch", noticing)


def results(futures):
    return [future.result(timeout=20) for future in futures]


def test_a_lone_caller_waits_for_nobody(batches, patient):
    assert made().sample(ask(3)).ids == (3,)
    assert batches == [[3]]


def test_a_full_queue_starts_at_once_whoever_else_lives(batches, patient):
    sampler = made(max_batch=3)
    for _ in range(50):
        sampler.enter_rollout()
    assert [found.ids for found in results(started(sampler, [ask(at) for at in (2, 0, 1)]))] == [(2,), (0,), (1,)]
    assert batches == [[0, 1, 2]]


def test_a_part_filled_queue_waits_for_the_live_rollouts(batches, patient):
    sampler = made(max_batch=64)
    for _ in range(4):
        sampler.enter_rollout()
    futures = started(sampler, [ask(2), ask(0), ask(1)])
    assert not batches
    futures += started(sampler, [ask(3)])
    results(futures)
    assert batches == [[0, 1, 2, 3]]


def test_a_rollout_that_leaves_is_not_waited_for(batches, patient):
    sampler = made()
    for _ in range(3):
        sampler.enter_rollout()
    futures = started(sampler, [ask(0), ask(1)])
    assert not batches
    sampler.leave_rollout()
    results(futures)
    assert batches == [[0, 1]]


def test_a_part_filled_queue_waits_no_longer_than_the_linger(batches, monkeypatch):
    monkeypatch.setattr(engine, "LINGER_S", 0.01)
    sampler = made()
    for _ in range(4):
        sampler.enter_rollout()
    results(started(sampler, [ask(0)]))
    assert batches == [[0]]


@pytest.mark.parametrize("max_batch", [2, 64])
def test_deterministic_batches_form_in_key_order_once_every_rollout_waits(batches, monkeypatch, max_batch):
    monkeypatch.setattr(engine, "LINGER_S", 0.0)  # neither time nor a full queue may start a batch
    sampler = made(deterministic=True, max_batch=max_batch)
    for _ in range(4):
        sampler.enter_rollout()
    futures = started(sampler, [ask(3), ask(1), ask(2)])
    time.sleep(0.05)
    assert not batches
    futures += started(sampler, [ask(0)])
    results(futures)
    assert batches == ([[0, 1], [2, 3]] if max_batch == 2 else [[0, 1, 2, 3]])


def test_a_rollout_with_racing_calls_counts_once(batches, patient):
    sampler = made(deterministic=True)
    for _ in range(2):
        sampler.enter_rollout()
    racing = [ask(0), ask(1, rollout=(0, 0, 0))]
    futures = started(sampler, racing)
    assert not batches
    futures += started(sampler, [ask(2)])
    results(futures)
    assert batches == [[0, 1, 2]]


def test_deterministic_runs_are_bit_equal_however_threads_are_scheduled(patient):
    def play():
        sampler = made(deterministic=True)
        found = {}

        def rollout(at):
            for turn in range(3):
                time.sleep(random.random() * 0.003)
                request = ask(at, key=(at, turn), prompt_ids=(*HEAD, at % 3, turn), seed=10 * at + turn)
                found[at, turn] = sampler.sample(request)
            sampler.leave_rollout()

        threads = [threading.Thread(target=rollout, args=(at,)) for at in range(6)]
        for _ in threads:
            sampler.enter_rollout()
        for thread in random.sample(threads, 6):
            thread.start()
        for thread in threads:
            thread.join(20)
        return found

    first, second = play(), play()
    assert len(first) == 18
    assert first == second  # ids and logprobs, to the last bit


def test_each_caller_gets_its_own_answer_and_tokens_are_counted():
    sampler = made()
    requests = [ask(at, prompt_ids=(*HEAD, at)) for at in range(6)]
    alone = [sampler.sample(request).ids for request in requests]
    before = sampler.sampled_tokens
    assert before == sum(map(len, alone))
    assert [found.ids for found in results(started(sampler, requests))] == alone
    assert sampler.sampled_tokens == 2 * before


def test_adapters_of_one_batch_each_answer_with_their_own_weights(tmp_path, patient):
    trainer = tiny_trainer(names=("a", "b"))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        trainer.save(name, "base", tmp_path / name)
    sampler = made()
    names = ["b", None, "a", "b"]
    for _ in names:
        sampler.enter_rollout()
    requests = [ask(at, adapter=name, folder=name and tmp_path / name) for at, name in enumerate(names)]
    for name, found in zip(names, results(started(sampler, requests)), strict=True):
        (wanted,) = trainer.logprobs(name, [Row(HEAD, found.ids)])
        assert list(found.logprobs) == pytest.approx(wanted.tolist(), abs=1e-4)


def test_an_error_reaches_every_caller_and_the_sampler_goes_on(batches, patient, monkeypatch):
    sampler = made()
    fake = engine.decode

    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, "decode", broken)
    for _ in range(3):
        sampler.enter_rollout()
    futures = started(sampler, [ask(at) for at in range(3)])
    for future in futures:
        error = future.exception(timeout=20)
        assert type(error) is SamplerError
        assert "out of memory" in str(error)
        assert isinstance(error.__cause__, RuntimeError)
    for _ in range(3):
        sampler.leave_rollout()
    monkeypatch.setattr(engine, "decode", fake)
    assert sampler.sample(ask(5)).ids == (5,)


def test_a_missing_adapter_is_said_as_it_is_and_only_to_those_who_asked(batches, patient, tmp_path):
    sampler = made()
    for _ in range(2):
        sampler.enter_rollout()
    good, bad = started(sampler, [ask(0), ask(1, folder=tmp_path / "gone")])
    error = bad.exception(timeout=20)
    assert isinstance(error, PolicyError)
    assert error.__cause__ is not error  # a chain that ends
    assert good.result(timeout=20).ids == (0,)


def test_a_closed_sampler_serves_who_waits_and_refuses_who_comes(batches, patient):
    sampler = made()
    for _ in range(2):
        sampler.enter_rollout()
    futures = started(sampler, [ask(0)])
    sampler.close()
    assert results(futures)[0].ids == (0,)
    sampler._thread.join(20)
    assert not sampler._thread.is_alive()
    with pytest.raises(SamplerError, match="closed"):
        sampler.sample(ask(1))
    assert batches == [[0]]


def test_closing_an_unused_sampler_starts_no_thread():
    sampler = made()
    sampler.close()
    assert sampler._thread is None
