"""What a real server answers: the trainer's numbers, adapters by version, seeds, limits."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import modpo
from modpo.errors import PromptTooLongError
from modpo.lm.sampler import SampleRequest
from modpo.lm.versions import adapter_folder
from modpo.preflight import preflight
from modpo.train.checkpoint import write_folder
from modpo.train.trie import Row
from tests.e2e.model import CONTEXT, policy
from tests.oracle import random_ids
from tests.tiny import save_tiny
from tests.vllm.conftest import SLOTS, cache_hits

pytestmark = pytest.mark.vllm
VERSIONS = (1, 2, 3)
PROMPT = random_ids(400, 5)  # several blocks of the server's cache


@pytest.fixture(scope="module")
def scored(narrow_base, tmp_path_factory):
    """Three random versions of an adapter in a folder, and the trainer's logprobs under each."""
    root = tmp_path_factory.mktemp("run")
    trainer = policy(narrow_base).trainer(("plan",))
    for version in VERSIONS:
        trainer.adapter("plan").scatter(version, 0.2)
        write_folder(adapter_folder(root, "plan", version), lambda work: trainer.save("plan", "base", work))

    def logprobs(version, completion):
        trainer.load("plan", adapter_folder(root, "plan", version))
        return trainer.logprobs("plan", [Row(PROMPT, completion.ids)])[0].tolist()

    return root, logprobs


def ask(root, version, **changes):
    request = SampleRequest(prompt_ids=PROMPT, max_tokens=8, seed=3, adapter="plan", version=version)
    return replace(request, folder=adapter_folder(root, "plan", version), **changes)


def test_sampler_and_trainer_agree(attached, tmp_path):
    report = preflight(attached, tmp_path)
    report.require()
    assert max(check.k3 for check in report.checks if check.k3 is not None) < 1e-6


def test_a_server_of_another_base_is_named(server, tmp_path):
    other = modpo.Policy(save_tiny(tmp_path / "base", "llama", 1), dtype="float32", sampler=modpo.VLLM(url=server))
    try:
        report = preflight(other, tmp_path)
    finally:
        other.sampler.close()
    (base,) = [check for check in report.checks if check.name == "base"]
    assert not base.ok
    assert "another base model" in base.cause


def test_no_version_is_answered_from_the_cache_of_another(attached, server, scored):
    root, logprobs = scored
    sampler = attached.sampler
    hits = [cache_hits(server)]
    for version in (1, 2, 1):
        sampler.prepare({f"plan@v{version}": adapter_folder(root, "plan", version)})
        for request in (ask(root, version), ask(root, version)):
            found = sampler.sample(request)
            assert list(found.logprobs) == pytest.approx(logprobs(version, found), abs=1e-3)
        hits.append(cache_hits(server))
    assert hits[0] < hits[1] < hits[2]  # each version's second request: the cache is on, and was not shared
    assert logprobs(1, found) != pytest.approx(logprobs(2, found), abs=0.1)


def test_more_versions_than_slots_at_the_same_time(attached, scored):
    root, logprobs = scored
    requests = [ask(root, version, seed=seed) for seed in range(4) for version in VERSIONS]
    with ThreadPoolExecutor(len(requests)) as pool:
        found = list(pool.map(attached.sampler.sample, requests))
    assert len(attached.sampler.slots.held) <= SLOTS < len(VERSIONS)
    for request, completion in zip(requests, found, strict=True):
        assert list(completion.logprobs) == pytest.approx(logprobs(request.version, completion), abs=1e-3)


def test_a_seed_draws_the_same_whatever_else_is_drawn(attached):
    requests = [SampleRequest(prompt_ids=PROMPT, max_tokens=8, seed=seed) for seed in range(8)]
    with ThreadPoolExecutor(len(requests)) as pool:
        together = [made.ids for made in pool.map(attached.sampler.sample, requests)]
    assert [attached.sampler.sample(request).ids for request in requests] == together
    assert len(set(together)) > 1


def test_a_prompt_longer_than_the_servers_context_is_data(attached):
    with pytest.raises(PromptTooLongError, match=str(CONTEXT)):
        attached.sampler.sample(SampleRequest(prompt_ids=random_ids(CONTEXT + 1, 1), max_tokens=8))
