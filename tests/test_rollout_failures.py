import re
import threading

import dspy
import pytest
from dspy.utils.exceptions import LMUnexpectedError

from modpo.errors import MetricError, PolicyError, PromptTooLongError, SamplerError, StoppedError
from modpo.lm.policy_lm import PolicyLM
from modpo.rollout import run
from tests.scripted import ScriptedPolicy, Simple, as_policy, jobs_for, one, slow_echo


def test_a_failed_parse_is_data_and_keeps_the_calls():
    def answer(request, prompt):
        return slow_echo(request, prompt) if request.adapter == "say" or "tag=e1" in prompt else "what?"

    program = Simple()
    policy = as_policy(program, answer)
    rollouts = run(jobs_for(2), program=program, metric=one, sampler=policy.sampler, failure_reward=-1.0)
    assert [(each.failure, each.reward) for each in rollouts] == [("parse", -1.0), (None, 1.0)]
    assert [(call.module, call.parsed) for call in rollouts[0].calls] == [("act", False), ("say", True)]
    assert rollouts[0].error.startswith("AdapterParseError")


@pytest.mark.parametrize("raised", [ZeroDivisionError("by zero"), SystemExit("leaving")])
def test_a_crashed_program_is_data_and_keeps_the_calls(raised):
    def fail(tag):
        if tag == "e0":
            raise raised

    program = Simple(fail)
    policy = as_policy(program, slow_echo)
    rollouts = run(jobs_for(2), program=program, metric=one, sampler=policy.sampler)
    assert [(each.failure, each.reward) for each in rollouts] == [("program", 0.0), (None, 1.0)]
    assert [call.module for call in rollouts[0].calls] == ["say"]
    assert str(raised) in rollouts[0].error
    assert policy.sampler.live == 0


def test_a_too_long_prompt_fails_its_rollout_with_the_length_named():
    class Growing(Simple):
        def forward(self, tag):
            return self.act(text=f"tag={tag} {self.say(text=f'tag={tag} x').said * 9}")

    program = Growing()
    policy = as_policy(program, slow_echo, context_length=900)
    (rollout,) = run(jobs_for(1), program=program, metric=one, sampler=policy.sampler)
    assert rollout.failure == "prompt"
    assert re.search(r"the prompt has \d+ tokens and the model's context 900", rollout.error)
    assert [(call.module, call.finish) for call in rollout.calls] == [("act", "error"), ("say", "stop")]


def test_a_time_out_is_data_and_its_thread_is_refused_further_calls():
    release, refused = threading.Event(), threading.Event()

    def fail(tag):
        if tag == "e1":
            release.wait(10)

    class Stubborn(Simple):
        def forward(self, tag):
            try:
                return super().forward(tag)
            except Exception:
                refused.set()
                raise

    program = Stubborn(fail)
    policy = as_policy(program, slow_echo)
    options = {"program": program, "metric": one, "sampler": policy.sampler, "threads": 1, "timeout_s": 0.4}
    rollouts = run(jobs_for(3), failure_reward=-2.0, **options)
    assert [(each.failure, each.reward) for each in rollouts] == [(None, 1.0), ("timeout", -2.0), (None, 1.0)]
    assert "longer than 0.4 s" in rollouts[1].error
    assert [call.module for call in rollouts[1].calls] == ["say"]
    assert policy.sampler.live == 0
    asked = len(policy.sampler.requests)
    release.set()
    assert refused.wait(5)
    assert len(policy.sampler.requests) == asked == 5


def test_a_slow_metric_runs_into_the_time_out_too():
    program = Simple()
    policy = as_policy(program, slow_echo)
    release = threading.Event()
    (rollout,) = run(
        jobs_for(1), program=program, metric=lambda e, p: release.wait(10), sampler=policy.sampler, timeout_s=0.3
    )
    release.set()
    assert (rollout.failure, policy.sampler.live) == ("timeout", 0)


def test_a_raising_metric_is_data():
    def metric(example, prediction):
        if example.tag == "e1":
            raise KeyError("gold")
        return 0.5

    program = Simple()
    policy = as_policy(program, slow_echo)
    rollouts = run(jobs_for(2), program=program, metric=metric, sampler=policy.sampler, failure_reward=-1.0)
    assert [(each.failure, each.reward) for each in rollouts] == [(None, 0.5), ("metric", -1.0)]
    assert rollouts[1].error == "KeyError: 'gold'"
    assert '"acted"' in rollouts[1].prediction


@pytest.mark.parametrize("value", [None, float("nan"), "good"])
def test_a_metric_without_a_number_stops_the_run_with_everything_kept(value):
    def metric(example, prediction):
        return value if example.tag == "e2" else 1.0

    program = Simple()
    policy = as_policy(program, slow_echo)
    with pytest.raises(MetricError, match="example 2;") as error:
        run(jobs_for(20), program=program, metric=metric, sampler=policy.sampler, threads=2)
    kept = error.value.rollouts
    assert [(each.example, each.failure) for each in kept][:3] == [(0, None), (1, None), (2, "metric")]
    assert len(kept) < 20
    assert len(policy.sampler.requests) == 2 * len(kept)
    assert policy.sampler.live == 0


def test_a_broken_sampler_stops_the_run_even_when_the_program_hides_it():
    def answer(request, prompt):
        if "tag=e3" in prompt:
            raise SamplerError("the server is gone")
        return slow_echo(request, prompt)

    class Hiding(Simple):
        def forward(self, tag):
            try:
                return super().forward(tag)
            except LMUnexpectedError:
                return dspy.Prediction(acted="nothing")

    program = Hiding()
    policy = as_policy(program, answer)
    with pytest.raises(SamplerError, match="the server is gone") as error:
        run(jobs_for(20), program=program, metric=one, sampler=policy.sampler, threads=1)
    assert [each.example for each in error.value.rollouts] == [0, 1, 2]
    assert policy.sampler.live == 0


def test_a_request_that_no_policy_can_honour_stops_the_run():
    program = Simple()
    policy = ScriptedPolicy(slow_echo)
    program.set_lm(PolicyLM(policy, top_p=0.5))
    with pytest.raises(PolicyError, match="top_p"):
        run(jobs_for(2), program=program, metric=one, sampler=policy.sampler)


def test_ctrl_c_passes_and_lets_the_threads_die():
    def interrupt(rollout):
        raise KeyboardInterrupt

    program = Simple()
    policy = as_policy(program, slow_echo)
    with pytest.raises(KeyboardInterrupt):
        run(jobs_for(9), program=program, metric=one, sampler=policy.sampler, threads=3, on_done=interrupt)
    assert policy.sampler.live == 0


def test_a_prompt_too_long_for_a_server_is_data_with_its_call():
    def answer(request, prompt):
        if request.adapter == "act":
            raise PromptTooLongError("the server's context has 14 tokens")
        return slow_echo(request, prompt)

    program = Simple()
    policy = as_policy(program, answer)
    (rollout,) = run(jobs_for(1), program=program, metric=one, sampler=policy.sampler)
    assert rollout.failure == "prompt"
    by_module = {call.module: call for call in rollout.calls}
    assert by_module["act"].finish == "error"
    assert "14 tokens" in by_module["act"].error


def test_another_thread_may_stop_it_and_what_ended_is_kept():
    program, stop, ended = Simple(), threading.Event(), []

    def slow(request, prompt):
        if len(ended) == 2:
            stop.set()
            threading.Event().wait(30)
        return slow_echo(request, prompt)

    policy = as_policy(program, slow)
    with pytest.raises(StoppedError) as error:
        run(
            jobs_for(9), program=program, metric=one, sampler=policy.sampler, threads=1, stop=stop,
            on_done=ended.append,
        )  # fmt: skip
    assert [each.example for each in error.value.rollouts] == [0, 1]
    assert policy.sampler.live == 0
