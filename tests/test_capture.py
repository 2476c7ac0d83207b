import asyncio
import copy

import dspy
import pytest
from dspy.utils.exceptions import AdapterParseError, ContextWindowExceededError, LMUnexpectedError

from modpo.errors import PolicyError, PromptTooLongError, SamplerError
from modpo.lm.capture import AsyncPolicyEngine, PolicyEngine
from modpo.lm.policy_lm import PolicyLM
from modpo.lm.recorder import Recorder, current_recorder, stamp_paths
from tests.scripted import ScriptedPolicy, Two, chat_answer, echo, played
from tests.tiny import tiny_tokenizer


def test_a_call_is_recorded_as_it_was_sampled():
    policy = ScriptedPolicy(echo)
    calls = played(Two(), policy, Recorder(temperature=0.7), text="hello")
    assert [(call.module, call.occurrence) for call in calls] == [("first", 0), ("first", 1), ("inner['k'].predict", 0)]
    call, request = calls[0], policy.sampler.requests[0]
    assert (call.adapter, call.version, call.model) == ("first", 0, "modpo/tiny/by-module@latest")
    assert call.prompt_ids == request.prompt_ids
    assert tiny_tokenizer().decode(list(call.completion_ids)) == call.text == chat_answer(out=f"first {request.seed}")
    assert call.logprobs == (-0.25,) * len(call.completion_ids)
    assert (call.temperature, request.temperature, call.finish, call.parsed) == (0.7, 0.7, "stop", True)
    assert (call.input_tokens, call.output_tokens) == (len(call.prompt_ids), len(call.completion_ids))
    assert request.stop == ("[[ ## completed ## ]]",)
    assert all(call.trainable for call in calls)


def test_a_failed_parse_is_a_call():
    policy = ScriptedPolicy(lambda request, prompt: "no fields here")
    program = Two()
    program.set_lm(PolicyLM(policy))
    stamp_paths(program)
    recorder = Recorder()
    with recorder.active(), pytest.raises(AdapterParseError):
        program(text="hello")
    (call,) = recorder.calls()  # no second try through JSON
    assert (call.parsed, call.text) == (False, "no fields here")
    assert call.error.startswith("AdapterParseError")
    assert call.trainable


def test_an_empty_answer_is_a_failed_parse():
    policy = ScriptedPolicy(lambda request, prompt: "")
    recorder = Recorder()
    with recorder.active(), pytest.raises(AdapterParseError):
        dspy.Predict("text -> out")(text="hello", lm=PolicyLM(policy))
    assert recorder.calls()[0].parsed is False


def test_several_answers_to_one_prompt_are_several_calls():
    policy = ScriptedPolicy(echo)
    predict = dspy.Predict("text -> out")
    recorder = Recorder()
    stamp_paths(predict)
    with recorder.active():
        result = predict(text="a", lm=PolicyLM(policy), config={"n": 3})
    calls = recorder.calls()
    assert [call.occurrence for call in calls] == [0, 1, 2]
    assert len(set(result.completions.out)) == 3
    assert [call.parsed for call in calls] == [True] * 3


def test_a_too_long_prompt_names_its_length_and_is_a_call():
    policy = ScriptedPolicy(echo, context_length=50)
    recorder = Recorder()
    with recorder.active(), pytest.raises(ContextWindowExceededError, match="has 555 tokens") as error:
        dspy.Predict("text -> out")(text="a", lm=PolicyLM(policy))
    assert isinstance(error.value.__cause__.__cause__, PromptTooLongError)
    (call,) = recorder.calls()
    assert call.finish == "error"
    assert "555 tokens and the model's context 50" in call.error
    assert policy.sampler.requests == []
    assert recorder.fatal is None


def test_the_answer_is_limited_to_the_room_that_is_left():
    policy = ScriptedPolicy(echo, context_length=562)
    recorder = Recorder()
    with recorder.active(), pytest.raises(AdapterParseError):
        dspy.Predict("text -> out")(text="a", lm=PolicyLM(policy))
    (call,) = recorder.calls()
    assert (call.input_tokens, call.output_tokens, call.finish) == (555, 7, "length")


@pytest.mark.parametrize("raised", [SamplerError("broken"), ValueError("broken")])
def test_a_broken_sampler_is_remembered_whatever_the_program_does(raised):
    def answer(request, prompt):
        raise raised

    recorder = Recorder()
    with recorder.active(), pytest.raises(LMUnexpectedError, match="broken"):
        dspy.Predict("text -> out")(text="a", lm=PolicyLM(ScriptedPolicy(answer)))
    assert isinstance(recorder.fatal, SamplerError)
    assert recorder.calls()[0].finish == "error"


def test_options_that_a_policy_cannot_honour_are_refused():
    recorder = Recorder()
    with recorder.active(), pytest.raises(LMUnexpectedError, match="does not take top_p"):
        dspy.Predict("text -> out")(text="a", lm=PolicyLM(ScriptedPolicy(echo), top_p=0.9))
    assert isinstance(recorder.fatal, PolicyError)


def test_outside_of_a_rollout_the_policy_draws_seeds_and_a_bare_call_is_the_bases():
    policy = ScriptedPolicy(lambda request, prompt: "yes")
    lm = PolicyLM(policy)
    assert current_recorder() is None
    assert lm("Is it?") == ["yes"]
    lm("Is it?", seed=77, temperature=0.5, max_tokens=9)
    first, second = policy.sampler.requests
    assert (first.adapter, first.seed, first.temperature, first.stop, first.rollout) == (None, 1, 0.0, (), ())
    assert (second.seed, second.temperature, second.max_tokens) == (77, 0.5, 9)


def test_logprobs_are_told_when_asked_for():
    lm = PolicyLM(ScriptedPolicy(lambda request, prompt: "yes"))
    request = dspy.lm15.Request(
        model=lm.model, messages=(dspy.lm15.Message.user("Is it?"),), config=dspy.lm15.Config(logprobs=0)
    )
    response = lm(request)
    assert [each.logprob for each in response.logprobs] == [-0.25] * 3
    assert [each.token_id for each in response.logprobs] == tiny_tokenizer().encode("yes", add_special_tokens=False)


def test_an_engine_is_never_cloned():
    engine = PolicyEngine(ScriptedPolicy(echo))
    assert copy.deepcopy(engine) is engine
    asynchronous = AsyncPolicyEngine(engine)
    assert copy.deepcopy({"a": asynchronous})["a"] is asynchronous
    program = Two()
    program.set_lm(PolicyLM(engine.policy))
    assert program.deepcopy().first.lm.policy is engine.policy


def test_streaming_gives_the_whole_answer():
    engine = PolicyEngine(ScriptedPolicy(lambda request, prompt: "yes"))
    request = dspy.lm15.Request(model="m", messages=(dspy.lm15.Message.user("Is it?"),))
    kinds = [event.type for event in engine.stream(request)]
    assert (kinds[0], kinds[-1]) == ("start", "end")

    async def collect():
        return [event.type async for event in AsyncPolicyEngine(engine).stream(request)]

    assert asyncio.run(collect()) == kinds
