"""What dspy.GRPO gets wrong, each reproduced there, goes right here: real trainer and store, scripted answers."""

import re

import dspy
import pytest

import modpo
from modpo.lm.render import plain_adapter
from modpo.optimizers import MMGRPO
from modpo.store import Store
from tests.scripted import ScriptedSampler
from tests.tiny import save_tiny, tiny_tokenizer

ADAPTERS = {"chat": dspy.ChatAdapter(), "xml": dspy.XMLAdapter(), "json": dspy.JSONAdapter()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("random") / "tiny")


class Two(dspy.Module):
    """Two modules of one signature class; the first is called a number of times that its answer tells."""

    def __init__(self, signature="text -> said"):
        super().__init__()
        signature = dspy.Signature(signature)
        self.first, self.second = dspy.Predict(signature), dspy.Predict(signature)

    def forward(self, text):
        said = self.first(text=text).said
        for turn in range(int(said) % 3):
            self.first(text=f"turn {turn}")
        return self.second(text=said)


def sample_of(request):
    return request.rollout[2]


@pytest.fixture(autouse=True)
def _scripted(monkeypatch):
    """A scripted sampler agrees with no trainer."""
    monkeypatch.setattr("modpo.optimizers.grpo.require_agreement", lambda policy, run: None)


@pytest.fixture
def compiled(tiny, tmp_path, monkeypatch):
    """Compile `Two` with scripted answers; the store's rollouts and groups, and the rows that were trained."""

    def work(answer, *, adapter="chat", steps=1, demos=(), **options):
        from modpo.train.trainer import Trainer

        trained, update = [], Trainer.update

        def taped(self, name, rows, objective, **more):
            trained.extend((name, row.prompt, row.completion) for row in rows)
            return update(self, name, rows, objective, **more)

        monkeypatch.setattr(Trainer, "update", taped)
        student = Two(**options)
        student.first.demos = list(demos)
        sampler = ScriptedSampler(lambda request, prompt: answer(request, prompt))
        policy = modpo.Policy(tiny, lora=modpo.LoRA(rank=2), dtype="float32", sampler=sampler)
        student.set_lm(policy.lm(max_tokens=80))
        optimizer = MMGRPO(
            lambda example, prediction, trace=None: float(prediction.said) / 10,
            run_folder=tmp_path / "run", steps=steps, examples_per_step=2, rollouts_per_example=4, quiet=True,
        )  # fmt: skip
        examples = [dspy.Example(text=f"ask {at}").with_inputs("text") for at in range(2)]
        with dspy.context(adapter=ADAPTERS[adapter]):
            optimizer.compile(student, trainset=examples)
        with Store.open(tmp_path / "run") as store:
            return store.rollouts(0), store.advantages(0), trained

    return work


def written(adapter, value):
    signature = dspy.Signature("text -> said")
    return plain_adapter(ADAPTERS[adapter]).format_assistant_message_content(signature, {"said": value})


@pytest.mark.parametrize("adapter", ["chat", "xml", "json"])
def test_what_is_trained_is_what_was_sampled_under_any_adapter(compiled, adapter):
    odd = "  \n"  # white space that rendering the parsed answer anew would lose

    def answer(request, prompt):
        return odd + written(adapter, str(sample_of(request)))

    rollouts, advantages, trained = compiled(answer, adapter=adapter)
    assert all(call.parsed for rollout in rollouts for call in rollout.calls)
    calls = {(i, j): call for i, r in enumerate(rollouts) for j, call in enumerate(r.calls)}
    sampled = [(calls[at].adapter, calls[at].prompt_ids, calls[at].completion_ids) for at, a in advantages.items() if a]
    assert sorted(trained) == sorted(sampled)
    assert all(tiny_tokenizer().decode(list(completion)).startswith(odd) for _, _, completion in trained)


def test_demos_stay_in_the_trained_prompt(compiled):
    demo = dspy.Example(text="a shown ask", said="0")
    _, _, trained = compiled(lambda request, prompt: written("chat", str(sample_of(request))), demos=[demo])
    prompts = {name: tiny_tokenizer().decode(list(prompt)) for name, prompt, _ in trained}
    assert "a shown ask" in prompts["first"]
    assert "a shown ask" not in prompts["second"]


def test_a_partial_parse_is_data_and_nothing_is_repeated(compiled):
    def answer(request, prompt):
        if sample_of(request) == 3:
            return "[[ ## said ## ]]\n1\n\n[[ ## completed ## ]]"  # the other field is missing
        return f"[[ ## said ## ]]\n{sample_of(request)}\n\n[[ ## more ## ]]\nx\n\n[[ ## completed ## ]]"

    rollouts, advantages, _ = compiled(answer, signature="text -> said, more")
    broken = [rollout for rollout in rollouts if rollout.sample == 3]
    assert {(rollout.failure, rollout.reward) for rollout in broken} == {("parse", 0.0)}
    for rollout in broken:
        (call,) = rollout.calls
        assert call.parsed is False
        assert call.completion_ids
        at = (rollouts.index(rollout), 0)
        assert advantages[at] < 0
    assert sorted((r.example, r.sample) for r in rollouts) == [(at, g) for at in range(2) for g in range(4)]


def test_a_rollout_that_fails_at_the_first_module_leaves_the_others_groups(compiled):
    def answer(request, prompt):
        return "no form at all" if sample_of(request) == 0 else written("chat", str(sample_of(request)))

    rollouts, advantages, trained = compiled(answer)
    second = [
        advantages[i, j] for i, r in enumerate(rollouts) for j, call in enumerate(r.calls) if call.module == "second"
    ]
    assert len(second) == 2 * 3
    assert any(second)
    assert {name for name, _, _ in trained} == {"first", "second"}


def test_modules_of_one_signature_class_are_told_apart(compiled):
    rollouts, _, trained = compiled(lambda request, prompt: written("chat", str(sample_of(request))))
    for rollout in rollouts:
        assert {call.module for call in rollout.calls} == {"first", "second"}
        assert all(call.adapter == call.module for call in rollout.calls)
    assert {name for name, _, _ in trained} == {"first", "second"}


def test_ragged_counts_are_compared_call_by_call(compiled):
    rollouts, advantages, trained = compiled(lambda request, prompt: written("chat", str(sample_of(request))))
    counts = {r.sample: sum(call.module == "first" for call in r.calls) for r in rollouts}
    assert counts == {0: 1, 1: 2, 2: 3, 3: 1}
    made = {(r.sample, c.occurrence): advantages[i, j] for i, r in enumerate(rollouts) for j, c in enumerate(r.calls)
            if c.module == "first" and r.example == 0}  # fmt: skip
    assert made[2, 2] == 0.0  # alone in its group: nothing to compare it with
    assert made[1, 1] == pytest.approx(-made[2, 1])
    assert made[1, 1] < 0
    assert sum(made[sample, 0] for sample in range(4)) == pytest.approx(0.0, abs=1e-6)
    assert len(trained) == sum(advantage != 0 for advantage in advantages.values())  # no row is sent twice


def test_several_lms_in_one_program(compiled, tiny, tmp_path):
    student = Two()
    sampler = ScriptedSampler(lambda request, prompt: written("chat", str(sample_of(request))))
    student.set_lm(modpo.Policy(tiny, dtype="float32", sampler=sampler).lm())
    student.second.set_lm(dspy.utils.DummyLM([{"said": str(at)} for at in range(8)]))
    optimizer = MMGRPO(
        lambda example, prediction, trace=None: float(prediction.said) / 10,
        run_folder=tmp_path / "mixed", steps=1, examples_per_step=2, rollouts_per_example=4, quiet=True,
    )  # fmt: skip
    made = optimizer.compile(student, trainset=[dspy.Example(text=f"ask {at}").with_inputs("text") for at in range(2)])
    assert optimizer.result.versions == {"first": 1}
    assert isinstance(made.second.lm, dspy.utils.DummyLM)
    assert re.fullmatch(r"modpo/tiny/first@v1#mixed", made.first.lm.model)
