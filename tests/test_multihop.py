import re

import dspy
import pytest
from dspy.utils import DummyLM

import modpo
from modpo.errors import TaskError
from modpo.optimizers import MMGRPO
from modpo.programs import multihop
from modpo.programs.multihop import MultiHop
from modpo.rollout import Job, run
from modpo.store import Store
from modpo.task import check_examples, load_task
from tests.lenient import Lenient, LenientPredict
from tests.scripted import ScriptedPolicy
from tests.tiny import save_tiny

FACTS = {"Ada Brel": "Ada Brel works for Tol Mills.", "Tol Mills": "Tol Mills is based in Karsk."}
QUESTION = "Name the town where the firm that Ada Brel works for is based."


@pytest.fixture(scope="module")
def task():
    return multihop.task(seed=1)


def entities(text):
    """Names in a text: words with a capital, one after the other; not the question's first word."""
    return set(re.findall(r"[A-Z]\w+(?: [A-Z]\w+)?", text.removeprefix("Name ")))


def best(passages):
    """The text of the first passage."""
    return passages.splitlines()[0].partition(" | ")[2]


def knowing(program, example, search):
    """An LM that does it right: asks for what the notes last named, notes the best passage, answers with its end."""

    def answers():
        notes = []
        for name in example.support:
            yield {"query": name}
            notes.append(best(search(name)))
            yield {"note": notes[-1]}
        yield {
            "answer": notes[-1].split()[-1] if len(example.answer.split()) == 1 else " ".join(notes[-1].split()[-2:])
        }

    program.set_lm(DummyLM(list(answers()), adapter=dspy.XMLAdapter()))
    return program


def test_each_hop_asks_searches_and_notes_before_the_answer():
    asked = []

    def search(query):
        asked.append(query)
        return FACTS.get(query, "nothing")

    replies = [
        {"query": "Ada Brel"}, {"note": FACTS["Ada Brel"]}, {"query": "Tol Mills"}, {"note": FACTS["Tol Mills"]},
        {"answer": "Karsk"},
    ]  # fmt: skip
    lm = DummyLM(replies, adapter=dspy.XMLAdapter())
    program = MultiHop(search)
    program.set_lm(lm)
    answered = program(question=QUESTION)
    assert asked == answered.queries == ["Ada Brel", "Tol Mills"]
    assert answered.notes == "Ada Brel works for Tol Mills. Tol Mills is based in Karsk."
    assert answered.answer == "Karsk"
    given = [entry["messages"][-1]["content"] for entry in lm.history]
    assert [each.count("<passages>") for each in given] == [0, 1, 0, 1, 0]
    assert "<notes>\nnone\n</notes>" in given[0]
    assert "<notes>\nAda Brel works for Tol Mills.\n</notes>" in given[2]
    assert dict(program.named_predictors()).keys() == {"querier", "noter", "answerer"}


def test_copies_share_the_search_and_another_predictor_may_be_used():
    index = {"many": "documents"}
    program = MultiHop(index.get, hops=3, predictor=dspy.ChainOfThought)
    assert program.deepcopy().search is program.search
    assert set(dict(program.named_predictors())) == {"querier.predict", "noter.predict", "answerer.predict"}


def test_what_cannot_be_searched_or_has_no_hops_is_refused():
    with pytest.raises(TaskError, match="hops=0; at least 1"):
        MultiHop(str, hops=0)
    with pytest.raises(TaskError, match="search is a dict; give a function"):
        MultiHop({})
    with pytest.raises(TaskError, match="hops=5; allowed: 1 .. 4"):
        multihop.task(hops=5)


def test_the_splits_share_no_entity_and_no_question(task):
    assert [len(split) for split in (task.trainset, task.valset, task.testset)] == [400, 64, 200]
    assert {module: len(traces) for module, traces in task.traces.items()} == {
        "querier": 192, "noter": 192, "answerer": 96,
    }  # fmt: skip
    check_examples(task.program, task.trainset)
    splits = [task.trainset, task.valset, task.testset, task.traces["answerer"]]
    met = [{name for each in split for name in (*each.get("support", []), each.answer)} for split in splits[:3]]
    met.append({name for each in splits[3] for name in entities(each.notes)})
    assert all(not (a & b) for at, a in enumerate(met) for b in met[:at])
    questions = [each.question for split in splits for each in split]
    assert len(set(questions)) == len(questions) == 760


@pytest.mark.parametrize("hops", [1, 2, 4])
def test_an_answer_is_unique_and_comes_only_by_the_documents_in_turn(hops):
    task = multihop.task(seed=5, hops=hops)
    search = task.program.search
    for example in task.testset[:40]:
        (start,) = entities(example.question)
        assert start == example.support[0]
        at = start
        for name in [*example.support[1:], example.answer]:
            # one document is about each entity, the best match of its name, and it names the next and nothing else
            found = best(search(at))
            assert found.startswith(at)
            assert entities(found) == {at, name}
            at = name
        if hops > 1:
            everything = search(f"{start} {example.answer} {example.question}").splitlines()
            assert not any({start, example.answer} <= entities(text.partition(" | ")[2]) for text in everything)


def test_traces_show_what_a_right_rollout_would_do(task):
    search = task.program.search
    for trace in task.traces["noter"]:
        assert trace.passages == search(trace.query)
        assert trace.note == best(trace.passages)
    for trace in task.traces["querier"]:
        place = trace.question if trace.notes == "none" else trace.notes
        assert trace.query in place
    for trace in task.traces["answerer"]:
        assert trace.notes.endswith((f"in {trace.answer}.", f"for {trace.answer}.", f"is {trace.answer}."))


def test_right_answers_score_one_and_a_wrong_query_nothing(task):
    search = task.program.search
    for example in task.testset[:9]:
        program = knowing(MultiHop(search), example, search)
        assert task.metric(example, program(**example.inputs())) == 1.0
    lost = example.copy(support=[example.support[0]] * 2)  # the second search asks for the first name again
    program = knowing(MultiHop(search), lost, search)
    assert task.metric(example, program(**example.inputs())) == 0.0


def test_the_task_is_a_function_of_its_seed_and_a_target():
    one, same, other = (multihop.task(seed=seed).trainset for seed in (3, 3, 4))
    assert [dict(each) for each in one] == [dict(each) for each in same] != [dict(each) for each in other]
    assert load_task("modpo.programs.multihop:task", {"hops": 1}).program.hops == 1


def test_perfect_rollouts_through_the_engine_score_one(task):
    example = task.testset[0]
    program = knowing(MultiHop(task.program.search), example, task.program.search)
    (rollout,) = run(
        [Job(example_index=0, example=example)], program=program, metric=task.metric,
        sampler=ScriptedPolicy(lambda *_: "").sampler,
    )  # fmt: skip
    assert (rollout.reward, rollout.failure) == (1.0, None)
    assert [call.module for call in rollout.calls].count("querier") == 2


def test_a_random_policy_is_trained_beside_a_frozen_note_taker(task, tmp_path):
    """Ragged: a search that finds nothing ends its rollout in the first or the second hop."""
    search = task.program.search

    def picky(query):
        if sum(map(ord, query)) % 4 == 0:
            raise LookupError("nothing found")
        return search(query)

    program = MultiHop(picky, hops=2, predictor=LenientPredict)
    policy = modpo.Policy(save_tiny(tmp_path / "tiny"), dtype="float32")
    program.set_lm(policy.lm(max_tokens=8))
    program.noter.set_lm(DummyLM([{"note": "so"}] * 200, adapter=Lenient()))

    def metric(example, prediction, trace=None):
        return sum(map(ord, prediction.answer)) % 3 / 2

    optimizer = MMGRPO(
        metric, run_folder=tmp_path / "run", steps=1, examples_per_step=3, rollouts_per_example=6,
        learning_rate=1e-3, quiet=True,
    )  # fmt: skip
    compiled = optimizer.compile(program, trainset=task.trainset[:6])
    assert optimizer.result.versions == {"querier": 1, "answerer": 1}
    assert isinstance(compiled.noter.lm, DummyLM)
    with Store.open(tmp_path / "run") as store:
        rollouts = store.rollouts(0)
        (step,) = store.steps("train")
        advantages = store.advantages(0)
    assert len(rollouts) == 18
    counts = [[call.module for call in rollout.calls] for rollout in rollouts]
    whole = [each for rollout, each in zip(rollouts, counts, strict=True) if rollout.failure is None]
    assert whole
    assert all((e.count("querier"), e.count("noter"), e.count("answerer")) == (2, 2, 1) for e in whole)
    broken = [rollout for rollout in rollouts if rollout.failure == "program"]
    assert broken
    assert {rollout.reward for rollout in broken} == {0.0}
    assert all("LookupError: nothing found" in rollout.error for rollout in broken)
    assert {rollout.failure for rollout in rollouts} <= {None, "program", "parse"}  # parse: nothing was said at all
    # the first and the second query of a rollout, and its answer, are compared with their like in three examples
    calls = {(at, place): c for at, r in enumerate(rollouts) for place, c in enumerate(r.calls)}
    learnt = {(calls[key].module, calls[key].occurrence) for key, advantage in advantages.items() if advantage}
    assert learnt == {("querier", 0), ("querier", 1), ("answerer", 0)}
    assert step.metrics["groups"] <= 9
