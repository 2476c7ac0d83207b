import re
import threading
from dataclasses import replace

import dspy

from modpo.lm.policy_lm import PolicyLM
from modpo.rollout import run
from tests.scripted import ScriptedPolicy, Simple, as_policy, jobs_for, one, slow_echo
from tests.tiny import tiny_tokenizer


class Shared(dspy.Signature):
    """Say something."""

    text: str = dspy.InputField()
    said: str = dspy.OutputField()


class Nested(dspy.Module):
    def __init__(self):
        super().__init__()
        self.think = dspy.ChainOfThought("text -> thought")

    def forward(self, text):
        return self.think(text=text)


class Everything(dspy.Module):
    """Nested modules, a repeated predictor, two predictors of one signature, a race, a random number of calls."""

    def __init__(self):
        super().__init__()
        self.left, self.right = dspy.Predict(Shared), dspy.Predict(Shared)
        self.nested = Nested()
        self.vote = dspy.Predict("text -> voted")
        self.more = [dspy.Predict("text -> number")]

    def forward(self, tag):
        left = self.left(text=f"tag={tag} left").said
        right = self.right(text=f"tag={tag} right").said
        self.nested(text=f"tag={tag} {left}")
        self.nested(text=f"tag={tag} {right}")
        texts = [f"tag={tag} {name}" for name in ("x", "y", "y", "z")]
        votes = dspy.Parallel(num_threads=4, disable_progress_bar=True)([(self.vote, {"text": text}) for text in texts])
        count = int(re.search(r"seed=(\d+)", left).group(1)) % 5
        for turn in range(count):
            self.more[0](text=f"tag={tag} turn {turn}")
        return dspy.Prediction(count=count, votes=[vote.voted for vote in votes])


def test_64_rollouts_on_8_threads_misattribute_nothing():
    def played():
        program = Everything()
        policy = as_policy(program, slow_echo)
        jobs = jobs_for(8, 8)
        rollouts = run(jobs, program=program, metric=one, sampler=policy.sampler, threads=8, run_seed=5)
        assert policy.sampler.live == 0
        assert policy.sampler.most_live <= 9  # a successor enters before its predecessor leaves
        return jobs, rollouts, policy

    jobs, rollouts, policy = played()
    assert [(each.example, each.sample, each.step) for each in rollouts] == [
        (job.example_index, job.sample, 3) for job in jobs
    ]
    assert sum(len(each.calls) for each in rollouts) == len(policy.sampler.requests)
    for rollout in rollouts:
        assert rollout.failure is None
        _check_attribution(rollout)
    counts = {len(rollout.calls) for rollout in rollouts}
    assert len(counts) > 1
    seeds = [request.seed for request in policy.sampler.requests]
    assert len(set(seeds)) == len(seeds)
    # Another run, with other delays, has the same calls to the last id.
    _, again, _ = played()
    assert [_timeless(rollout) for rollout in again] == [_timeless(rollout) for rollout in rollouts]


def _check_attribution(rollout):
    numbers: dict[str, list[int]] = {}
    for call in rollout.calls:
        numbers.setdefault(call.module, []).append(call.occurrence)
        said = f"{call.module} tag=e{rollout.example} rollout=(3, {rollout.example}, {rollout.sample}) seed="
        assert said in call.text
        assert f"tag=e{rollout.example} " in tiny_tokenizer().decode(list(call.prompt_ids))
        assert call.adapter == call.module
        assert call.parsed
    count = len(numbers.pop("more[0]", []))
    assert f'"count": {count}' in rollout.prediction
    assert numbers == {"left": [0], "right": [0], "nested.think.predict": [0, 1], "vote": [0, 1, 2, 3]}
    left, right = (next(call for call in rollout.calls if call.module == name) for name in ("left", "right"))
    assert "left\n" in tiny_tokenizer().decode(list(left.prompt_ids))
    assert "right\n" in tiny_tokenizer().decode(list(right.prompt_ids))


def _timeless(rollout):
    calls = tuple(replace(call, seconds=0.0) for call in rollout.calls)
    votes = rollout.prediction.split("votes")[0]  # equal racing calls may swap their answers
    return replace(rollout, calls=calls, seconds=0.0, prediction=votes)


def test_the_program_is_not_changed_and_lms_are_shared():
    class Counting(dspy.Module):
        def __init__(self):
            super().__init__()
            self.say = dspy.Predict("text -> said")
            self.seen = []

        def forward(self, tag):
            self.seen.append(tag)
            return self.say(text=f"tag={tag} x")

    program = Counting()
    policy = as_policy(program, slow_echo)
    lm = program.say.lm
    rollouts = run(jobs_for(3), program=program, metric=one, sampler=policy.sampler)
    assert program.seen == []
    assert program.say.lm is lm
    assert len(lm.history) == 3  # one LM object answered for all copies
    assert [rollout.calls[0].version for rollout in rollouts] == [0, 0, 0]


def test_a_slow_metric_does_not_hold_the_next_program():
    second = threading.Event()

    def fail(tag):
        if tag == "e1":
            second.set()

    def metric(example, prediction):
        # True only when the other program runs while this metric does, on one thread.
        return second.wait(5)

    program = Simple(fail)
    policy = as_policy(program, slow_echo)
    rollouts = run(jobs_for(2), program=program, metric=metric, sampler=policy.sampler, threads=1)
    assert [each.reward for each in rollouts] == [1.0, 1.0]


def test_settings_of_the_caller_reach_the_program_and_the_metric():
    seen = []

    def metric(example, prediction):
        seen.append((dspy.settings.get("modpo_recorder"), dspy.settings.get("of_the_caller")))
        return dspy.Prediction(score=0.5, feedback="so so", turn_scores=[0.0, 1.0])

    program = Simple()
    policy = as_policy(
        program, lambda request, prompt: "<said>a</said>" if request.adapter == "say" else "<acted>b</acted>"
    )
    with dspy.context(adapter=dspy.XMLAdapter(), of_the_caller=7):
        (rollout,) = run(jobs_for(1), program=program, metric=metric, sampler=policy.sampler)
    assert seen == [(None, 7)]
    assert (rollout.reward, rollout.feedback, rollout.turn_scores) == (0.5, "so so", (0.0, 1.0))
    assert rollout.prediction == '{"acted": "b"}'


def test_the_temperature_is_that_of_all_policy_calls_or_the_programs_own():
    program = Simple()
    policy = as_policy(program, slow_echo)
    program.say.config = {"temperature": 0.3}
    for given, temperatures in ((None, [0.3, 0.0]), (1.0, [1.0, 1.0]), (0.0, [0.0, 0.0])):
        policy.sampler.requests.clear()
        run(jobs_for(1), program=program, metric=one, sampler=policy.sampler, temperature=given)
        assert [request.temperature for request in policy.sampler.requests] == temperatures


def test_done_rollouts_are_told_in_the_callers_thread():
    told = []
    program = Simple()
    policy = as_policy(program, slow_echo)

    def on_done(rollout):
        told.append((threading.current_thread(), rollout))

    rollouts = run(jobs_for(5), program=program, metric=one, sampler=policy.sampler, on_done=on_done)
    assert {thread for thread, _ in told} == {threading.current_thread()}
    assert sorted((rollout for _, rollout in told), key=lambda each: each.example) == rollouts


def test_a_truncated_answer_is_no_warning(caplog):
    program = Simple()
    policy = ScriptedPolicy(slow_echo)
    program.set_lm(PolicyLM(policy, max_tokens=3))
    (rollout,) = run(jobs_for(1), program=program, metric=one, sampler=policy.sampler)
    assert rollout.calls[0].finish == "length"
    assert not [record for record in caplog.records if "truncated" in record.getMessage()]


def test_nothing_to_run():
    policy = ScriptedPolicy(slow_echo)
    assert run([], program=Simple(), metric=one, sampler=policy.sampler) == []
