import asyncio

import dspy
import pytest
from dspy.utils.dummies import DummyLM
from dspy.utils.exceptions import AdapterParseError, LMUnexpectedError

from modpo.errors import RolloutTimeoutError
from modpo.lm.policy_lm import PolicyLM
from modpo.lm.recorder import PATH, Recorder, stamp_paths
from tests.scripted import ScriptedPolicy, Two, chat_answer, echo, played
from tests.tiny import tiny_tokenizer


def test_paths_are_dspys_names_and_survive_a_deep_copy():
    program = Two()
    assert set(stamp_paths(program)) == {"first", "inner['k'].predict"}
    assert program.deepcopy().inner["k"].predict.__dict__[PATH] == "inner['k'].predict"
    single = dspy.Predict("a -> b")
    assert stamp_paths(single) == {"self": single}


def test_predictors_of_a_compiled_submodule_have_paths_too():
    program = Two()
    program.inner["k"]._compiled = True
    assert set(stamp_paths(program)) == {"first"}
    assert "predict" in program.inner["k"].predict.__dict__[PATH]


def test_seeds_depend_on_run_rollout_module_prompt_and_ordinal_only():
    def seeds(**who):
        policy = ScriptedPolicy(echo)
        played(Two(), policy, Recorder(**who), text="hello")
        return [request.seed for request in policy.sampler.requests]

    first = seeds(run_seed=1, step=2, example=3, sample=4)
    assert len(set(first)) == 3  # also the two equal prompts of one module
    assert first == seeds(run_seed=1, step=2, example=3, sample=4)
    for change in ({"run_seed": 9}, {"step": 9}, {"example": 9}, {"sample": 9}):
        other = seeds(**({"run_seed": 1, "step": 2, "example": 3, "sample": 4} | change))
        assert not set(first) & set(other)
    assert all(0 <= seed < 2**63 for seed in first)


def test_request_keys_order_by_rollout_module_prompt_and_ordinal():
    policy = ScriptedPolicy(echo)
    played(Two(), policy, Recorder(step=2, example=3, sample=4), text="hello")
    one, two, three = policy.sampler.requests
    assert one.rollout == two.rollout == (2, 3, 4)
    assert one.key[:4] == (2, 3, 4, "first")
    assert one.key < two.key < three.key
    assert (one.key[-1], two.key[-1]) == (0, 1)


def test_every_adapter_marks_its_parses():
    answers = iter(["<out>1</out>", '{"out": 2}', "<out>3"])
    policy = ScriptedPolicy(lambda request, prompt: next(answers))
    predict = dspy.Predict("text -> out")
    recorder = Recorder()
    with recorder.active():
        with dspy.context(adapter=dspy.XMLAdapter()):
            predict(text="a", lm=PolicyLM(policy))
        with dspy.context(adapter=dspy.JSONAdapter()):
            predict(text="b", lm=PolicyLM(policy))
        with dspy.context(adapter=dspy.XMLAdapter(use_json_adapter_fallback=False)), pytest.raises(AdapterParseError):
            predict(text="c", lm=PolicyLM(policy))
    assert {call.text: call.parsed for call in recorder.calls()} == {
        "<out>1</out>": True,
        '{"out": 2}': True,
        "<out>3": False,
    }
    assert [request.stop for request in policy.sampler.requests] == [("</out>",), (), ("</out>",)]


def test_frozen_modules_are_recorded_without_tokens():
    program = Two()
    policy = ScriptedPolicy(echo)
    program.set_lm(PolicyLM(policy))
    program.first.set_lm(DummyLM([{"out": "x"}, {"out": "y"}]))
    stamp_paths(program)
    recorder = Recorder()
    with recorder.active():
        program(text="hello")
    frozen = [call for call in recorder.calls() if call.module == "first"]
    assert [(call.occurrence, call.adapter, call.trainable, call.parsed) for call in frozen] == [
        (0, None, False, True),
        (1, None, False, True),
    ]
    assert "x" in frozen[0].text
    assert frozen[0].model == "dummy"


def test_a_frozen_call_that_raises_is_recorded():
    class Broken:
        def complete(self, request):
            raise OSError("no route")

    predict = dspy.Predict("text -> out")
    recorder = Recorder()
    stamp_paths(predict)
    with recorder.active(), pytest.raises(LMUnexpectedError):
        predict(text="a", lm=dspy.LM("some/model", engine=Broken(), cache=False, num_retries=0))
    (call,) = recorder.calls()
    assert (call.finish, call.module) == ("error", "self")
    assert "no route" in call.error


def test_usage_of_a_frozen_call_is_told():
    class Counted:
        def complete(self, request):
            part = dspy.lm15.TextPart(chat_answer(out="x"))
            usage = dspy.lm15.Usage(input_tokens=11, output_tokens=5, total_tokens=16)
            message = dspy.lm15.Message.assistant([part])
            return dspy.lm15.Response(id=None, model="m", message=message, finish_reason="stop", usage=usage)

    recorder = Recorder()
    with recorder.active():
        dspy.Predict("text -> out")(text="a", lm=dspy.LM("some/model", engine=Counted(), cache=False))
    assert (recorder.calls()[0].input_tokens, recorder.calls()[0].output_tokens) == (11, 5)


def test_a_closed_recorder_refuses_calls_and_keeps_what_was():
    policy = ScriptedPolicy(echo)
    recorder = Recorder()
    frozen = DummyLM([{"out": "x"}] * 3)
    predict = dspy.Predict("text -> out")
    with recorder.active():
        predict(text="a", lm=PolicyLM(policy))
        recorder.close()
        with pytest.raises(LMUnexpectedError) as error:
            predict(text="b", lm=PolicyLM(policy))
        assert isinstance(error.value.__cause__, RolloutTimeoutError)
        # A frozen module's call costs money: nothing catches this one.
        with pytest.raises(SystemExit):
            predict(text="c", lm=frozen)
    assert len(recorder.calls()) == len(policy.sampler.requests) == 1


def test_racing_calls_are_numbered_by_prompt_between_the_calls_around_them():
    """Eight threads, then one call of the same module before and after."""

    class Racing(dspy.Module):
        def __init__(self):
            super().__init__()
            self.say = dspy.Predict("text -> out")

        def forward(self, texts):
            self.say(text="zz")
            pairs = [(self.say, {"text": text}) for text in texts]
            dspy.Parallel(num_threads=8, disable_progress_bar=True)(pairs)
            return self.say(text="aa")

    texts = ["d", "b", "b", "c", "a"]
    numbered = []
    for given in (texts, texts[::-1]):
        calls = played(Racing(), ScriptedPolicy(echo), Recorder(), texts=given)
        numbered.append([(call.occurrence, call.prompt_ids, call.text) for call in calls])
        prompts = [tiny_tokenizer().decode(list(call.prompt_ids)).rsplit("## text ## ]]\n")[-1][0] for call in calls]
        assert prompts == ["z", "a", "b", "b", "c", "d", "a"]
    assert numbered[0] == numbered[1]


def test_async_calls_are_captured():
    class Async(dspy.Module):
        def __init__(self):
            super().__init__()
            self.say = dspy.Predict("text -> out")

        async def both(self, together):
            if together:
                await asyncio.gather(*[self.say.acall(text=text) for text in ("b", "a")])
            else:
                await self.say.acall(text="b")
                await self.say.acall(text="a")

        def forward(self, together):
            asyncio.run(self.both(together))

    def order(together):
        calls = played(Async(), ScriptedPolicy(echo), together=together)
        assert [call.parsed for call in calls] == [True, True]
        return [tiny_tokenizer().decode(list(call.prompt_ids)).rsplit("## text ## ]]\n")[-1][0] for call in calls]

    assert order(together=False) == ["b", "a"]  # one task: a sequence
    assert order(together=True) == ["a", "b"]  # two tasks race: by prompt
