"""The report: intervals, strict JSON, tables and the curve."""

import io
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from modpo import report
from modpo.credit import recipe
from modpo.errors import ConfigError
from modpo.ledger import Usage
from modpo.records import Call, Group, Member, Rollout
from modpo.store import AdapterFile, RunInfo, StepRecord, Store, Validation, list_runs


def a_rollout(reward: float, *, failure: bool = False) -> Rollout:
    plan = Call(
        module="plan[0].predict",
        occurrence=0,
        model="tiny",
        adapter="plan",
        version=0,
        completion_ids=(1,),
        parsed=False,
    )
    judge = Call(module="judge", occurrence=0, model="gpt", output_tokens=4)
    kind = {"failure": "timeout", "error": "late"} if failure else {}
    return Rollout(step=0, example=0, sample=0, calls=(plan, judge), reward=reward, **kind)  # type: ignore[arg-type]


def fill(store: Store) -> Store:
    store.save_run(RunInfo(name="legs", optimizer="MMGRPO", target="x.py:task", settings={"steps": 4}))
    store.save_step(StepRecord(step=0, phase="warm", metrics={"loss": math.nan}))
    group = Group((0, "plan", 0), (Member(0, 0), Member(1, 0)), (1.0, 0.0))
    for step in range(2):
        rollouts = [a_rollout(step * 0.5 + 0.5), a_rollout(0.0, failure=step == 0)]
        adapters = [AdapterFile("plan", step + 1, store.adapter_folder("plan", step + 1), "0" * 64)]
        store.save_step(StepRecord(step=step, rollouts=rollouts, groups=[group], adapters=adapters))
    zeros, half, ones = (0.0,) * 10, (0.0, 1.0) * 5, (1.0,) * 10
    store.save_validation(Validation(label="before", step=-1, scores=zeros))
    store.save_validation(Validation(label="warm", step=-1, scores=half))
    store.save_validation(Validation(label="step", step=0, scores=half))
    store.save_validation(Validation(label="after", step=1, scores=ones, adapters={"plan": 2}))
    store.save_costs([Usage(model="gpt", calls=4, output_tokens=16, dollars=0.5)])
    store.set_status("stopped", "Ctrl-C", seconds_left=90)
    return store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return fill(Store.create(tmp_path / "run"))


def printed(*shown: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    for one in shown:
        console.print(one)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_interval_of_a_mean_has_the_normal_width_and_is_reproducible() -> None:
    scores = [1.0] * 50 + [0.0] * 50
    low, high = report.mean_interval(scores)
    # Standard error of a mean of 100 fair coins: 0.05.
    assert low == pytest.approx(0.5 - 1.96 * 0.05, abs=0.011)
    assert high == pytest.approx(0.5 + 1.96 * 0.05, abs=0.011)
    assert report.mean_interval(scores) == (low, high)
    narrow = report.mean_interval(scores, level=0.5)
    assert low < narrow[0] < narrow[1] < high


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(100):
        low, high = report.mean_interval(rng.normal(0.3, 1.0, size=60), resamples=500, seed=trial)
        hits += low <= 0.3 <= high
    assert 88 <= hits <= 100  # 95 expected; 88 is three standard deviations below


def test_intervals_without_spread_or_scores() -> None:
    assert report.mean_interval([0.25] * 4) == (0.25, 0.25)
    assert all(math.isnan(end) for end in report.mean_interval([]))


def test_a_gain_is_paired() -> None:
    before = [0.0, 1.0] * 20
    after = [value + 0.125 for value in before]
    assert report.gain_interval(before, after) == (0.125, 0.125)  # the spread between examples cancels
    with pytest.raises(ConfigError, match="same examples, got 40 and 39"):
        report.gain_interval(before, after[1:])


def test_json_is_strict() -> None:
    @dataclass
    class Result:
        run: Path
        scores: tuple[float, ...]

    value = {1: Result(Path("a/b"), (1.0, math.nan, math.inf)), "n": np.float32(0.5), "i": np.arange(2)}
    assert json.loads(report.to_json(value)) == {
        "1": {"run": "a/b", "scores": [1.0, None, None]},
        "n": 0.5,
        "i": [0, 1],
    }
    assert json.loads(report.to_json(recipe("mmgrpo")))["name"] == "mmgrpo"


def test_the_summary_has_the_numbers(store: Store) -> None:
    known = json.loads(report.to_json(report.summary(store)))
    assert (known["name"], known["status"], known["message"]) == ("legs", "stopped", "Ctrl-C")
    assert [(step["phase"], step["reward"]) for step in known["steps"]] == [
        ("warm", None),
        ("train", 0.25),
        ("train", 0.5),
    ]
    assert known["steps"][0]["metrics"] == {"loss": None}
    assert [one["mean"] for one in known["validations"]] == [0.0, 0.5, 0.5, 1.0]
    assert known["gain"]["mean"] == 0.5
    assert (known["gain"]["from"], known["gain"]["to"]) == ("warm", "after")
    assert 0.1 <= known["gain"]["ci95"][0] < 0.5 < known["gain"]["ci95"][1] <= 0.9
    judge, plan = known["modules"]
    assert (judge["calls"], judge["adapter"], judge["output_tokens"]) == (4, None, 16)
    assert (plan["calls"], plan["parse_failures"], plan["groups"], plan["silent"]) == (4, 4, 2, 0)
    assert [(one["name"], one["version"]) for one in known["adapters"]] == [("plan", 2)]
    assert known["failures"] == {"none": 3, "timeout": 1}
    assert known["costs"][0]["dollars"] == 0.5


def test_the_tables_say_what_happened(store: Store) -> None:
    said = printed(*report.tables(report.summary(store)))
    for part in (
        "stopped: Ctrl-C",
        "2 of 4, warm start 1",
        "0.250 → 0.500",
        "plan@v2",
        "plan[0].predict",
        "4 (100%)",
        "0 (0%)",
        "gain +50.0 points",
        "1 timeout, of 4",
        "0.5000",
        "seconds left",
    ):
        assert part in said, part


def test_a_run_that_has_just_begun_has_tables(tmp_path: Path) -> None:
    fresh = Store.create(tmp_path / "fresh")
    fresh.save_run(RunInfo(name="legs", optimizer="MMGRPO"))
    assert "interrupted" in printed(*report.tables(report.summary(fresh)))
    assert report.summary(fresh)["gain"] is None
    assert report.plot(fresh, tmp_path / "fresh.png").stat().st_size > 1000


def test_runs_are_a_table(store: Store) -> None:
    said = printed(report.runs_table(list_runs(store.folder.parent)))
    assert "legs" in said
    assert "100.0" in said


def test_the_curve_is_a_png(store: Store, tmp_path: Path) -> None:
    path = report.plot(store, tmp_path / "curve.png")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


def test_a_curve_without_matplotlib_says_what_to_install(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'modpo\[demo\]'"):
        report.plot(store, tmp_path / "curve.png")
