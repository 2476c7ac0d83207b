import copy
import json
import pickle
import uuid

import dspy
import pytest
from dspy.utils.exceptions import LMUnexpectedError

from modpo.errors import PolicyError, TaskError
from modpo.lm.policy import Policy
from modpo.lm.policy_lm import PolicyLM, replay
from modpo.lm.recorder import Recorder, stamp_paths
from tests.scripted import ScriptedPolicy, asked_fields, chat_answer, kept_run
from tests.tiny import tiny_tokenizer


def echo(request, prompt):
    return chat_answer(**dict.fromkeys(asked_fields(prompt), f"{request.adapter}@{request.version}"))


def test_the_model_name_tells_weights_apart():
    policy = ScriptedPolicy(echo)
    assert PolicyLM(policy).model == "modpo/tiny/by-module@latest"
    assert PolicyLM(policy, "plan", 3).model == "modpo/tiny/plan@v3"
    assert PolicyLM(policy, "plan", 3, run="runs/a").model == "modpo/tiny/plan@v3#a"
    assert PolicyLM(policy, "plan").model == "modpo/tiny/plan@latest"
    with pytest.raises(PolicyError, match="of which adapter"):
        PolicyLM(policy, version=3)


def test_a_named_adapter_answers_for_any_module(tmp_path):
    policy = ScriptedPolicy(echo)
    run = kept_run(tmp_path, "a", ("plan", 2))
    predict = dspy.Predict("text -> out")
    predict.set_lm(PolicyLM(policy, "plan", 2, run=run))
    assert predict(text="a").out == "plan@2"
    assert policy.sampler.requests[0].folder == tmp_path / "a" / "adapters" / "plan" / "v2"
    predict.set_lm(PolicyLM(policy, "plan"))
    assert predict(text="a").out == "plan@0"
    assert policy.sampler.requests[1].folder is None
    predict.set_lm(PolicyLM(policy, "plan", 3, run=run))
    with pytest.raises(LMUnexpectedError, match="plan@v3 is not in"):
        predict(text="a")


def test_the_calling_modules_path_finds_the_adapter():
    policy = ScriptedPolicy(echo, adapters={"self": "mapped"})
    predict = dspy.Predict("text -> out")
    predict.set_lm(PolicyLM(policy))
    assert predict(text="a").out == "None@None"  # not stamped: no module, the base answers
    stamp_paths(predict)
    assert predict(text="a").out == "mapped@0"


def test_copies_share_the_policy_and_not_the_options():
    policy = ScriptedPolicy(echo)
    lm = PolicyLM(policy, "plan", 2, run="runs/a", max_tokens=9)
    for other in (lm.copy(), copy.copy(lm), copy.deepcopy(lm)):
        assert other.policy is policy
        assert (other.adapter, other.version, other.model, other.kwargs) == ("plan", 2, lm.model, lm.kwargs)
    warm = lm.copy(temperature=1.0, rollout_id=7)
    assert (warm.kwargs["temperature"], lm.kwargs["temperature"], warm.version) == (1.0, 0.0, 2)
    newer = lm.copy(version=3)
    assert (newer.adapter, newer.version, newer.model, lm.version) == ("plan", 3, "modpo/tiny/plan@v3#a", 2)
    assert (newer.engine.run, newer.kwargs["max_tokens"]) == ("runs/a", 9)
    assert (lm.copy(adapter="act").version, lm.copy(run="runs/b").version) == (None, 2)


def test_a_saved_program_finds_its_policy_again(tmp_path, monkeypatch):
    policy = ScriptedPolicy(echo)
    run = kept_run(tmp_path, "a", ("predict", 2))
    states = []

    def attach(state):
        states.append(json.loads(json.dumps(state)))
        return policy

    monkeypatch.setattr(Policy, "attach", attach)
    program = dspy.ChainOfThought("text -> out")
    program.set_lm(PolicyLM(policy, "predict", 2, run=run, max_tokens=99, temperature=0.5, stop=["\n\n\n"]))
    program.save(tmp_path / "program.json")
    loaded = dspy.ChainOfThought("text -> out")
    with pytest.raises(ValueError, match="allow_unsafe_lm_state"):
        loaded.load(tmp_path / "program.json")
    loaded.load(tmp_path / "program.json", allow_unsafe_lm_state=True)
    lm = loaded.predict.lm
    assert isinstance(lm, PolicyLM)
    assert (lm.model, lm.adapter, lm.version, lm.engine.run) == ("modpo/tiny/predict@v2#a", "predict", 2, run)
    assert lm.kwargs == program.predict.lm.kwargs
    assert lm.num_retries == 0
    assert loaded(text="a").out == "predict@2"
    assert states[0] == {"base": "tiny", "adapter": "predict", "version": 2, "run": run}
    revived = pickle.loads(pickle.dumps(lm.engine))
    assert (revived.policy, revived.adapter, revived.version) == (policy, "predict", 2)


def test_dspys_cache_is_used_for_a_runs_fixed_version_outside_of_rollouts_only(tmp_path):
    policy = ScriptedPolicy(echo)
    first = kept_run(tmp_path, "a", ("plan", 2))
    second = kept_run(tmp_path, "b", ("plan", 2), ("plan", 3))
    predict = dspy.Predict("text -> out")
    text = str(uuid.uuid4())  # DSPy's cache is on disk and outlives the test

    def asked(**which):
        policy.sampler.requests.clear()
        for _ in range(2):
            predict(text=text, lm=PolicyLM(policy, "plan", cache=True, **which))
        return len(policy.sampler.requests)

    assert asked() == 2
    with Recorder().active():
        assert asked(version=2, run=first) == 2
    assert asked(version=2, run=first) == 1
    assert asked(version=2, run=second) == 1
    assert asked(version=3, run=second) == 1


def _program():
    program = dspy.ChainOfThought("question -> answer")
    program.predict.demos = [dspy.Example(question="demo?", reasoning="as shown", answer="demo!")]
    return program


def test_replay_has_the_prompt_of_a_rollout_and_the_written_answer():
    policy = ScriptedPolicy(echo)
    program = _program()
    trace = dspy.Example(question="2+2?", reasoning="two and two", answer="4").with_inputs("question")
    call = replay(program, "predict", trace, policy)
    assert policy.sampler.requests == []
    text = chat_answer(reasoning="two and two", answer="4")
    assert (call.text, tiny_tokenizer().decode(list(call.completion_ids))) == (text, text)
    assert (call.module, call.adapter, call.version) == ("predict", "predict", 0)
    assert (call.parsed, call.finish) == (True, "stop")
    assert call.logprobs == (0.0,) * len(call.completion_ids)
    program.set_lm(PolicyLM(policy))
    recorder = Recorder()
    with recorder.active():
        program(question="2+2?")
    assert recorder.calls()[0].prompt_ids == call.prompt_ids
    assert "demo!" in tiny_tokenizer().decode(list(call.prompt_ids))


def test_replay_ends_with_end_of_text_where_no_marker_ends_the_answer():
    with dspy.context(adapter=dspy.JSONAdapter()):
        call = replay(dspy.Predict("q -> a"), "self", dspy.Example(q="1", a="2").with_inputs("q"), ScriptedPolicy(echo))
    assert call.completion_ids[-1] == tiny_tokenizer().eos_token_id
    assert call.text == '{\n  "a": "2"\n}'


def test_replay_says_what_is_wrong_with_a_trace():
    policy = ScriptedPolicy(echo)
    trace = dspy.Example(question="2+2?", answer="4").with_inputs("question")
    with pytest.raises(TaskError, match="did you mean 'predict'"):
        replay(_program(), "predictor", trace, policy)
    with pytest.raises(TaskError, match="lacks reasoning; it has question, answer"):
        replay(_program(), "predict", trace, policy)
    with pytest.raises(TaskError, match=r"trace of module 'self' fails: AdapterParseError"):
        replay(dspy.Predict("q -> a: int"), "self", dspy.Example(q="1", a="many").with_inputs("q"), policy)
    short = ScriptedPolicy(echo, context_length=600)
    with pytest.raises(PolicyError, match=r"has \d+ tokens, the context 600"):
        replay(dspy.Predict("q -> a"), "self", dspy.Example(q="1", a="b" * 200).with_inputs("q"), short)
    with pytest.raises(TaskError, match="the prompt has"):
        replay(dspy.Predict("q -> a"), "self", dspy.Example(q="1" * 600, a="b").with_inputs("q"), short)


def test_replay_goes_through_a_named_adapter_like_the_rollout():
    policy = ScriptedPolicy(echo, adapters={"predict": "shared"})
    trace = dspy.Example(question="2+2?", reasoning="two and two", answer="4").with_inputs("question")
    assert replay(_program(), "predict", trace, policy).adapter == "shared"
