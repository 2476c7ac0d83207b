import threading

import pytest
import torch

from modpo import Policy
from modpo.config import LoRA
from modpo.errors import ConfigError, PolicyError
from modpo.lm import policy as policy_module
from modpo.lm.sampler import SampleRequest
from modpo.train.trainer import Trainer
from modpo.train.trie import Row
from tests.oracle import random_ids, randomised
from tests.scripted import ScriptedSampler, echo
from tests.tiny import save_tiny

PROMPT = random_ids(10, 1)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def tiny(base, **options):
    return Policy(base, **{"dtype": "float32", "device": "cpu", "lora": LoRA(rank=3), **options})


@pytest.mark.parametrize(
    ("adapters", "planner", "judge"),
    [("per-module", "planner", "judge"), ("shared", "shared", "shared"), ({"planner": "p"}, "p", None)],
)
def test_adapters_are_found_by_the_modules_path(adapters, planner, judge):
    policy = Policy("x/tiny", adapters=adapters)
    assert (policy.adapter_for("planner"), policy.adapter_for("judge")) == (planner, judge)
    assert policy.version(planner) == 0


def test_a_mapping_is_copied_and_knows_its_names():
    mapping = {"planner": "thinker"}
    policy = Policy("x/tiny", adapters=mapping)
    mapping["judge"] = "other"
    assert policy.adapter_for("judge") is None
    with pytest.raises(PolicyError, match="unknown adapter 'thinkr'; allowed: thinker; did you mean 'thinker'"):
        policy.version("thinkr")


@pytest.mark.parametrize("adapters", ["per_module", 3, ["planner"]])
def test_other_forms_of_adapters_are_refused(adapters):
    with pytest.raises(ConfigError, match="allowed: 'per-module', 'shared', or a mapping"):
        Policy("x/tiny", adapters=adapters)


def test_another_dtype_is_refused():
    with pytest.raises(ConfigError, match=r"dtype='fp16'; allowed: 'auto', 'float32', 'bfloat16'"):
        Policy("x/tiny", dtype="fp16")


def test_nothing_is_loaded_until_something_needs_it():
    policy = Policy("no/such-model")
    assert policy.name == "such-model"
    assert policy.lm().policy is policy
    assert policy.state("a", 1, "runs/x")["base"] == "no/such-model"
    assert "_loaded" not in policy.__dict__


def test_many_threads_load_the_base_once(base, monkeypatch):
    from modpo.lm.local import model

    loads = []
    plain = model.load_base
    monkeypatch.setattr(model, "load_base", lambda *given: loads.append(given) or plain(*given))
    policy = tiny(base)
    seen = []
    uses = [lambda: policy.sampler, lambda: policy.sampler, lambda: policy.trainer(("a",))]
    threads = [threading.Thread(target=lambda use=use: seen.append(use()), daemon=True) for use in uses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(seen) == 3
    assert loads == [(base, "float32", "cpu")]
    assert policy.sampler in seen


def test_loading_and_a_trainer_at_once_do_not_wait_for_each_other(base, monkeypatch):
    """The trainer asks for the base while another thread is loading it."""
    from modpo.lm.local import model

    policy = tiny(base)
    loading, proceed = threading.Event(), threading.Event()
    plain = model.load_base

    def slow(*given):
        loading.set()
        assert proceed.wait(20)
        return plain(*given)

    monkeypatch.setattr(model, "load_base", slow)
    found = []
    first = threading.Thread(target=lambda: found.append(policy.sampler), daemon=True)
    first.start()
    assert loading.wait(20)
    second = threading.Thread(target=lambda: found.append(policy.trainer(("a",))), daemon=True)
    second.start()
    proceed.set()
    first.join(20)
    second.join(20)
    assert len(found) == 2


def test_what_it_says_of_itself(base):
    assert tiny(base).describe() == "tiny in float32 (as asked)"


def test_auto_says_that_it_measured(base, monkeypatch):
    from modpo.lm.local import model

    monkeypatch.setattr(model, "fastest_dtype", lambda device: "bfloat16")
    policy = tiny(base, dtype="auto")
    assert policy.describe() == "tiny in bfloat16 (measured to be the faster here)"
    # a loaded program computes as the one that was saved, whatever the machine
    assert policy.state("a", 1, None)["dtype"] == "bfloat16"


def test_tokenizer_and_context_are_the_bases(base):
    policy = tiny(base)
    assert policy.context_length == 2048
    assert policy.tokenizer.chat_template is not None


def test_a_sampler_of_ones_own_is_used_as_it_is():
    sampler = ScriptedSampler(echo)
    policy = Policy("x/tiny", sampler=sampler)
    assert policy.sampler is sampler
    with pytest.raises(PolicyError, match="needs the local sampler"):
        policy.make_deterministic()


def test_deterministic_mode_before_and_after_loading(base):
    before, after = tiny(base, dtype="auto"), tiny(base)
    assert not after.sampler.deterministic
    for policy in (before, after):
        policy.make_deterministic()
        assert policy.sampler.deterministic
        assert policy.describe().startswith("tiny in float32")


def test_deterministic_mode_is_refused_once_bf16_is_loaded(base):
    policy = tiny(base, dtype="bfloat16")
    assert policy.context_length
    with pytest.raises(PolicyError, match="dtype='float32'"):
        policy.make_deterministic()


def test_the_sampler_answers_with_what_the_trainer_learnt(base, tmp_path):
    policy = tiny(base)
    trainer = policy.trainer(("a", "b"))
    assert isinstance(trainer, Trainer)
    randomised(trainer.adapter("a"))
    trainer.save("a", policy.base, tmp_path)
    for folder, name in ((tmp_path, "a"), (None, None), (None, "b")):
        request = SampleRequest(prompt_ids=PROMPT, folder=folder, max_tokens=6, seed=3)
        found = policy.sampler.sample(request)
        (wanted,) = trainer.logprobs(name, [Row(PROMPT, found.ids)])
        torch.testing.assert_close(torch.tensor(found.logprobs), wanted, rtol=1e-4, atol=1e-4)


def test_a_new_trainer_starts_fresh_adapters_by_seed(base):
    policy = tiny(base)
    first = list(policy.trainer(("a",), seed=1).adapter("a").parameters())
    again = list(policy.trainer(("a",), seed=1).adapter("a").parameters())
    other = list(policy.trainer(("a",), seed=2).adapter("a").parameters())
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))


def test_a_saved_state_leads_back_to_one_policy_per_process(monkeypatch):
    monkeypatch.setattr(policy_module, "_attached", {})
    policy = Policy("x/tiny", adapters={"planner": "p"}, lora=LoRA(rank=4, targets=("q_proj",)), dtype="float32")
    one = Policy.attach(policy.state("p", 3, "runs/one"))
    two = Policy.attach(policy.state("p", 5, "runs/two"))
    assert one is two
    assert (one.base, one.adapters, one.lora, one.dtype) == (policy.base, policy.adapters, policy.lora, "float32")
    other = Policy("x/tiny", dtype="float32").state("planner", 1, "runs/one")
    assert Policy.attach(other) is not one


def test_seeds_outside_of_rollouts_differ_and_are_in_range():
    policy = Policy("x/tiny")
    seeds = {policy.draw_seed() for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)
