"""The BANKING77 example: its data, traces and program, on a small file of the same form."""

import csv
from pathlib import Path
from types import ModuleType

import dspy
import pytest
from dspy.utils.dummies import DummyLM

from modpo.errors import TaskError
from tests.examples import ROOT, load_example


@pytest.fixture(scope="module")
def banking77() -> ModuleType:
    return load_example("banking77")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with 25 intents, 20 training and 4 test messages of each, one of them in both files."""
    for split, size in (("train", 20), ("test", 4)):
        with (tmp_path / f"banking77_{split}.csv").open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["text", "category"])
            for k in range(25):
                writer.writerows((f"{split} message {n}, about {k}", f"Intent_{k}?") for n in range(size))
                writer.writerow((f"said twice about {k}", f"Intent_{k}?"))
    return tmp_path


def test_the_task_keeps_test_messages_out_of_training(banking77: ModuleType, data: Path) -> None:
    task = banking77.banking(str(data), seed=0)
    traces = task.traces["shortlist"]
    learnt = {e.message for e in [*task.trainset, *task.valset, *traces]}
    assert len(learnt) == 20 * 20 == len(task.trainset) + len(task.valset) + len(traces)
    assert len(task.testset) == 20 * 5
    assert learnt.isdisjoint(e.message for e in task.testset)
    assert {e.intent for e in task.testset} == {e.intent for e in banking77.banking(str(data), seed=1).testset}


def test_traces_hold_the_right_intent_among_the_shortlisted(banking77: ModuleType, data: Path) -> None:
    task = banking77.banking(str(data), seed=0)
    places = set()
    for short, decide in zip(task.traces["shortlist"], task.traces["decide"], strict=True):
        right = f"intent {short.message.rpartition(' ')[2]}"
        assert short.intents.split(", ")[0] == decide.intent == right
        assert sorted(short.intents.split(", ")) == sorted(decide.intents.split(", "))
        assert len(set(short.intents.split(", "))) == banking77.SHORTLIST
        places.add(decide.intents.split(", ").index(right))
    assert places == set(range(banking77.SHORTLIST))


def test_the_program_decides_among_its_shortlist(banking77: ModuleType) -> None:
    program = banking77.Classify(["card arrival", "lost card"])
    lm = DummyLM([{"intents": "lost card, card arrival"}, {"intent": "Lost card"}], adapter=dspy.XMLAdapter())
    program.set_lm(lm)
    prediction = program(message="Where is it?")
    assert banking77.accuracy(dspy.Example(intent="lost card"), prediction) == 1.0
    assert banking77.accuracy(dspy.Example(intent="card arrival"), prediction) == 0.0
    assert "<intents>\nlost card, card arrival\n</intents>" in lm.history[-1]["messages"][-1]["content"]


def test_a_folder_without_the_files_is_said(banking77: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no banking77_test.csv in"):
        banking77.banking(str(tmp_path), seed=0)


def test_the_real_files_give_twenty_intents(banking77: ModuleType) -> None:
    folder = ROOT.parent / "shared/data"
    if not folder.is_dir():
        pytest.skip(f"the data set is not at {folder}")
    task = banking77.banking(str(folder), seed=0)
    assert len({e.intent for e in task.trainset}) == 20
    assert len(task.testset) == 200
