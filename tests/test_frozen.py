"""Frozen modules inside rollouts: counted, held within the budget, retried by DSPy, and never trained."""

import threading

import dspy
import litellm
import pytest

from modpo.config import Budget
from modpo.errors import BudgetError
from modpo.ledger import Ledger
from modpo.rollout import Job, run
from tests.loopback import serving
from tests.scripted import ScriptedPolicy

MODEL = "openai/frozen-test-model"
litellm.register_model(
    {
        MODEL: {
            "input_cost_per_token": 0.001,
            "output_cost_per_token": 0.01,
            "litellm_provider": "openai",
            "mode": "chat",
        }
    }
)


class Api:
    """An OpenAI-compatible endpoint that fails as told before it answers."""

    def __init__(self):
        self.fail = 0  # how many requests get a 503 first
        self.asked = 0
        self.lock = threading.Lock()

    def answer(self, path, body):
        with self.lock:
            self.asked += 1
            if self.fail > 0:
                self.fail -= 1
                return 503, {"error": {"message": "overloaded", "type": "server_error"}}
        message = {"role": "assistant", "content": "[[ ## verdict ## ]]\nyes\n\n[[ ## completed ## ]]"}
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return 200, {"id": "x", "object": "chat.completion", "created": 0, "model": "frozen-test-model",
                     "choices": [choice], "usage": usage}  # fmt: skip


@pytest.fixture
def api():
    made = Api()
    with serving(made.answer) as url:
        made.url = f"{url}/v1"
        yield made


def program(api, **options):
    made = dspy.Predict("text -> verdict")
    made.set_lm(dspy.LM(MODEL, api_base=api.url, api_key="none", cache=False, max_tokens=20, **options))
    return made


def judged(program, ledger, count=1, threads=1):
    examples = [dspy.Example(text=f"text {at}").with_inputs("text") for at in range(count)]
    jobs = [Job(example_index=at, example=example) for at, example in enumerate(examples)]
    sampler = ScriptedPolicy(lambda *_: "").sampler
    return run(
        jobs, program=program, metric=lambda e, p, trace=None: p.verdict == "yes", sampler=sampler, threads=threads,
        ledger=ledger,
    )  # fmt: skip


def test_tokens_and_dollars_reach_the_ledger_and_the_call_is_recorded(api):
    ledger = Ledger()
    (rollout,) = judged(program(api), ledger)
    assert rollout.reward == 1.0
    (call,) = rollout.calls
    assert (call.model, call.trainable, call.input_tokens, call.output_tokens) == (MODEL, False, 100, 10)
    assert call.dollars == pytest.approx(0.2)
    (usage,) = ledger.totals()
    assert (usage.model, usage.calls, usage.input_tokens, usage.output_tokens) == (MODEL, 1, 100, 10)
    assert usage.dollars == pytest.approx(0.2)


def test_the_call_that_would_pass_the_budget_is_not_made(api):
    # a prompt of some 600 bytes, at most that many tokens, and 20 out cost at most a dollar
    ledger = Ledger(Budget(dollars=1.5))
    with pytest.raises(BudgetError, match="budget of 1.5 dollars is spent") as stopped:
        judged(program(api), ledger, count=50)
    assert 1 <= api.asked <= 7
    assert len(stopped.value.rollouts) == api.asked  # what ended is kept
    assert sum(usage.dollars for usage in ledger.totals()) == pytest.approx(0.2 * api.asked)


def test_calls_side_by_side_do_not_pass_it_together(api):
    ledger = Ledger(Budget(tokens=3000))
    with pytest.raises(BudgetError, match="held for calls under way|3000 tokens"):
        judged(program(api), ledger, count=64, threads=64)
    assert sum(usage.input_tokens + usage.output_tokens for usage in ledger.totals()) <= 3000


def test_a_transient_failure_is_tried_again_and_a_final_one_is_data(api):
    api.fail = 1
    ledger = Ledger()
    (rollout,) = judged(program(api, num_retries=2), ledger)
    assert rollout.failure is None
    assert api.asked == 2
    api.fail = 100
    (rollout,) = judged(program(api, num_retries=1), ledger)
    assert rollout.failure == "program"
    assert rollout.calls[0].finish == "error"
    assert "overloaded" in rollout.error


def test_the_program_outside_of_rollouts_is_not_touched(api):
    made = program(api)
    lm = made.lm
    judged(made, Ledger(Budget(dollars=1.5)))
    assert made.lm is lm
    assert type(lm) is dspy.LM
    assert made(text="free").verdict == "yes"
    assert len(lm.history) == 2  # rollouts and calls share it
