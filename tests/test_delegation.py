import dspy
import pytest
from dspy.utils import DummyLM

import modpo
from modpo.errors import ConfigError, MetricError
from modpo.optimizers import MMGRPO
from modpo.programs import delegation
from modpo.programs.delegation import Delegate, compose, leak, quality_and_leakage, without
from modpo.programs.judges import exact
from modpo.rollout import Job, run
from modpo.store import Store
from modpo.task import check_examples, load_task
from tests.lenient import Lenient, LenientPredict
from tests.scripted import ScriptedPolicy
from tests.tiny import save_tiny

DETAILS = {
    "name": "Ada Brel",
    "phone": "0417-553-2208",
    "email": "ada.brel@karskholm.example",
    "account": "4417 9023",
}
EXAMPLE = dspy.Example(request="...", answer="84", details=DETAILS, asked=["name", "phone"]).with_inputs("request")
QUERY = "Someone buys 12 boxes at 7 euros each. How many euros is that?"
ANSWER = "Ada Brel, 0417-553-2208: 84"


@pytest.fixture(scope="module")
def task():
    return delegation.task(seed=1)


def scored(query=QUERY, answer=ANSWER, example=EXAMPLE, **options):
    return quality_and_leakage(**options)(example, dspy.Prediction(query=query, answer=answer))


@pytest.mark.parametrize(
    ("detail", "text", "piece"),
    [
        ("Ada Brel", "ADA  BREL buys", "Ada Brel"),
        ("Ada Brel", "a-d-a b.r.e.l", "Ada Brel"),
        ("Ada Brel", "Mrs Brel's boxes", "brel"),
        ("Ada Brel", "Brelton, Adam", None),  # other words
        ("0417-553-2208", "call (0417) 553 2208", "0417-553-2208"),
        ("0417-553-2208", "it ends in 2208", "2208"),
        ("0417-553-2208", "41-75", "4175"),
        ("0417-553-2208", "208 euros", None),  # three digits tell nobody
        ("ada.brel@karskholm.example", "write to karskholm", "karskholm"),
        ("ada.brel@karskholm.example", "an example", None),
        ("42", "aged 42", "42"),
        ("42", "420 boxes", None),
        ("Straße", "STRASSE", "Straße"),
    ],
)
def test_what_a_text_tells_of_a_detail(detail, text, piece):
    assert leak(detail, text) == piece


def test_details_are_taken_out_however_they_are_written():
    assert without("84, for ada brel (0417 553 2208).", DETAILS.values()) == "84, for   ( )"
    assert without(ANSWER, DETAILS.values()) == "84"
    assert without("Al sailed on; aged 4: 84", ["Al", "4"]) == "sailed on; aged  : 84"  # as words alone


def test_all_right_scores_one():
    made = scored()
    assert made.score == 1.0
    assert made.measures == {"quality": 1.0, "leakage": 0.0}
    assert made.feedback == "right, complete, and nothing leaked"


def test_a_last_name_alone_is_one_detail_of_four():
    made = scored(query=QUERY.replace("Someone", "Brel"))
    # quality 1; name and e-mail address share the last name: 2 of 4 details
    assert made.measures == {"quality": 1.0, "leakage": 0.5}
    assert made.score == 0.5
    assert made.feedback == "the query leaks name (brel), email (brel)"
    account = scored(query=f"{QUERY} Account ends in 9023.")
    assert (account.score, account.feedback) == (0.75, "the query leaks account (9023)")


def test_half_of_quality_is_the_answer_and_half_the_details_asked_for():
    wrong = scored(answer="Ada Brel, 0417-553-2208: 83")
    assert (wrong.score, wrong.feedback) == (0.5, "the answer should say 84")
    partly = scored(answer="Ada Brel: 84")
    assert (partly.score, partly.feedback) == (0.75, "the answer lacks phone")
    nothing = scored(answer="")
    assert nothing.score == 0.0
    assert nothing.feedback == "the answer should say 84; the answer lacks name, phone"
    # the answer's own number counts, not the digits of a detail
    assert scored(answer="84 euros. Ada Brel, 0417-553-2208").score == 1.0


def test_the_weight_of_leakage_and_the_judge_may_be_chosen():
    leaky = f"{QUERY} Account 4417 9023."
    assert scored(query=leaky, weight=2.0).score == 0.5
    assert scored(query=leaky, weight=0.0).score == 1.0
    assert scored(query=" ".join(DETAILS.values()), weight=9.0).score == 0.0  # never below
    named = dspy.Example(answer="Karsk", details=DETAILS, asked=["name"])
    assert scored(answer="Karsk, Ada Brel", example=named, judge=exact()).score == 1.0
    with pytest.raises(ConfigError, match="weight=-1"):
        quality_and_leakage(weight=-1)
    with pytest.raises(MetricError, match="the prediction has no 'query' to judge"):
        quality_and_leakage()(EXAMPLE, dspy.Prediction(answer=ANSWER))


def test_the_untrusted_module_sees_the_query_and_nothing_else():
    own = DummyLM([{"query": QUERY}, {"answer": ANSWER}], adapter=dspy.XMLAdapter())
    foreign = DummyLM([{"reply": "84"}], adapter=dspy.XMLAdapter())
    program = Delegate()
    program.set_lm(own)
    program.untrusted.set_lm(foreign)
    made = program(request="I am Ada Brel ...")
    assert (made.query, made.reply, made.answer) == (QUERY, "84", ANSWER)
    (asked,) = foreign.history
    assert asked["messages"][-1]["content"] == f"<query>\n{QUERY}\n</query>"
    assert all(leak(text, str(asked["messages"])) is None for text in DETAILS.values())
    assert set(dict(program.named_predictors())) == {"rewriter", "untrusted", "answerer"}


def test_every_request_can_be_answered_in_full_without_a_leak(task):
    assert [len(split) for split in (task.trainset, task.valset, task.testset)] == [400, 64, 200]
    check_examples(task.program, task.trainset)
    for example in [*task.trainset, *task.valset, *task.testset]:
        assert all(text in example.request for text in example.details.values())
        made = task.metric(example, dspy.Prediction(query=example.query, answer=compose(example)))
        assert made.score == 1.0
        told = task.metric(example, dspy.Prediction(query=example.request, answer=compose(example)))
        assert (told.score, told.measures["leakage"]) == (0.0, 1.0)


def test_the_splits_and_traces_are_of_different_people(task):
    people = [example.details["name"] for split in (task.trainset, task.valset, task.testset) for example in split]
    traced = [trace.request.split(",")[0].removeprefix("I am ") for trace in task.traces["rewriter"]]
    assert len({*people, *traced}) == 400 + 64 + 200 + 96
    assert {module: len(traces) for module, traces in task.traces.items()} == {"rewriter": 96, "answerer": 96}


def test_traces_ask_without_details_and_answer_with_the_reply(task):
    for trace in task.traces["rewriter"]:
        name = trace.request.split(",")[0].removeprefix("I am ")
        assert leak(name, trace.query) is None
        assert trace.query.replace("Someone", name) in trace.request
    for trace in task.traces["answerer"]:
        assert trace.answer.endswith(f": {trace.reply}")


def test_the_task_is_a_function_of_its_seed_and_a_target():
    one, same, other = (delegation.task(seed=seed).trainset for seed in (3, 3, 4))
    assert [dict(each) for each in one] == [dict(each) for each in same] != [dict(each) for each in other]
    assert load_task("modpo.programs.delegation:task").name == "delegation"


def scripted(example, *, query=None, answer=None):
    """The program with perfect answers, or those given instead."""
    program = Delegate()
    replies = [{"query": query or example.query}, {"answer": answer or compose(example)}]
    program.set_lm(DummyLM(replies, adapter=dspy.XMLAdapter()))
    program.untrusted.set_lm(DummyLM([{"reply": example.answer}], adapter=dspy.XMLAdapter()))
    return program


def test_rollouts_keep_the_score_and_what_leaked(task):
    example = task.testset[0]
    last = example.details["name"].split()[1]
    options = {"metric": task.metric, "sampler": ScriptedPolicy(lambda *_: "").sampler}
    job = [Job(example_index=0, example=example)]
    (perfect,) = run(job, program=scripted(example), **options)
    assert (perfect.reward, perfect.failure) == (1.0, None)
    (spoilt,) = run(job, program=scripted(example, query=f"{last}: {example.query}"), **options)
    assert spoilt.reward == 0.5  # the last name tells of name and e-mail address
    assert spoilt.feedback == f"the query leaks name ({last.lower()}), email ({last.lower()})"
    assert [call.module for call in spoilt.calls if call.adapter is None].count("untrusted") == 1


def test_a_random_policy_is_trained_around_a_frozen_untrusted_lm(task, tmp_path):
    program = Delegate(predictor=LenientPredict)
    policy = modpo.Policy(save_tiny(tmp_path / "tiny"), dtype="float32")
    program.set_lm(policy.lm(max_tokens=8))
    untrusted = DummyLM([{"reply": "84"}] * 100, adapter=Lenient())
    program.untrusted.set_lm(untrusted)

    def metric(example, prediction, trace=None):
        made = task.metric(example, prediction)  # random weights earn nothing: another spread is lent to them
        return dspy.Prediction(score=sum(map(ord, prediction.answer)) % 3 / 2, feedback=made.feedback)

    optimizer = MMGRPO(
        metric, run_folder=tmp_path / "run", steps=1, examples_per_step=3, rollouts_per_example=6,
        learning_rate=1e-3, quiet=True,
    )  # fmt: skip
    compiled = optimizer.compile(program, trainset=task.trainset[:6])
    assert optimizer.result.versions == {"rewriter": 1, "answerer": 1}
    assert compiled.untrusted.lm is untrusted
    with Store.open(tmp_path / "run") as store:
        rollouts = store.rollouts(0)
        advantages = store.advantages(0)
    assert len(rollouts) == 18
    assert {rollout.failure for rollout in rollouts} <= {None, "parse"}  # parse: nothing was said at all
    whole = [rollout for rollout in rollouts if rollout.failure is None]
    assert whole
    assert all("the answer should say" in rollout.feedback for rollout in whole)
    assert all({c.module for c in rollout.calls} == {"rewriter", "untrusted", "answerer"} for rollout in whole)
    frozen = [call for rollout in rollouts for call in rollout.calls if call.module == "untrusted"]
    assert all(call.adapter is None and call.text == "<reply>\n84\n</reply>" for call in frozen)
    calls = {(at, place): call for at, rollout in enumerate(rollouts) for place, call in enumerate(rollout.calls)}
    assert {calls[key].module for key, advantage in advantages.items() if advantage} == {"rewriter", "answerer"}
