"""The store: exact round trips, numbers by hand, readable errors."""

import json
import math
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from modpo.errors import RunVersionError, StoreError
from modpo.ledger import Usage
from modpo.records import Group, Member
from modpo.store import AdapterFile, RunInfo, StepRecord, Store, Validation, hash_folder, list_runs
from tests.store_values import a_call, a_rollout, a_store, stored


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return a_store(tmp_path / "run")


def test_rollouts_come_back_exactly(store: Store) -> None:
    died = replace(a_rollout(1, 0.0, ()), failure="timeout", error="late", turn_scores=None, feedback=None)
    rollouts = [a_rollout(), died, a_rollout(2, 1 / 3)]
    store.save_step(StepRecord(step=4, rollouts=rollouts, advantages={(0, 1): 1 / 7, (2, 0): -2.0}))
    with Store.open(store.folder) as again:
        assert again.rollouts(4) == [stored(rollout) for rollout in rollouts]
        assert again.advantages(4) == {(0, 1): 1 / 7, (2, 0): -2.0}
        assert again.rollouts(5) is None


def test_token_arrays_keep_int32_and_float32(store: Store) -> None:
    ids = tuple(range(0, 3_000_000, 997))
    call = replace(a_call(), completion_ids=ids, logprobs=tuple(-float(i) / 1024 for i in range(len(ids))))
    odd = replace(a_call(), completion_ids=(5,), logprobs=(-0.1,), prompt_ids=())
    store.save_rollouts(0, [a_rollout(calls=(call, odd))])
    found = store.rollouts(0)
    assert found is not None
    assert found[0].calls[0].completion_ids == ids
    assert found[0].calls[0].logprobs == call.logprobs
    assert found[0].calls[1].prompt_ids == ()
    assert found[0].calls[1].logprobs == (-0.10000000149011612,)  # -0.1 in float32


def test_saving_a_step_replaces_its_rollouts_and_marks_it_done(store: Store) -> None:
    store.save_rollouts(0, [a_rollout(), a_rollout(1)])
    assert store.last_done_step() is None
    assert [step.done for step in store.steps()] == [False]
    store.save_step(StepRecord(step=0, rollouts=[a_rollout(reward=0.25)], metrics={"loss": math.inf}))
    assert store.last_done_step() == 0
    (step,) = store.steps()
    assert (step.done, step.reward, step.metrics) == (True, 0.25, {"loss": math.inf})
    assert store.rollouts(0) == [stored(a_rollout(reward=0.25))]


def test_phases_are_apart_and_the_warm_start_comes_first(store: Store) -> None:
    store.save_step(StepRecord(step=0, phase="train"))
    store.save_step(StepRecord(step=0, phase="warm"))
    store.save_step(StepRecord(step=1, phase="warm"))
    assert [(step.phase, step.step) for step in store.steps()] == [("warm", 0), ("warm", 1), ("train", 0)]
    assert (store.last_done_step("warm"), store.last_done_step()) == (1, 0)
    assert store.rollouts(0) == []


def test_adapters_are_found_in_a_moved_run_and_checked(store: Store, tmp_path: Path) -> None:
    folder = store.adapter_folder("plan.predict", 2)
    assert folder == store.folder / "adapters" / "plan.predict" / "v2"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    file = AdapterFile("plan.predict", 2, folder, hash_folder(folder))
    outside = AdapterFile("other", 0, tmp_path / "elsewhere", "0" * 64)
    store.save_step(StepRecord(step=0, phase="warm", adapters=[file, outside]))
    moved = store.folder.rename(tmp_path / "moved")
    with Store.open(moved) as again:
        other, plan = again.latest_adapters()
        assert plan == file._replace(folder=moved / "adapters" / "plan.predict" / "v2")
        assert other == outside
        again.verify(plan)
        (plan.folder / "adapter_config.json").write_text("{ }")
        with pytest.raises(StoreError, match=r"plan\.predict v2 .* was changed"):
            again.verify(plan)
        with pytest.raises(StoreError, match="missing"):
            again.verify(other)


@pytest.mark.parametrize("name", ["..", ".", "a/b", "steps[0].predict", "x y"])
def test_adapter_folders_stay_inside_the_run(store: Store, name: str) -> None:
    folder = store.adapter_folder(name, 0)
    assert folder.resolve().parent.parent == (store.folder / "adapters").resolve()


def test_module_table_numbers(store: Store) -> None:
    frozen = replace(a_call("judge", adapter=None), completion_ids=(), logprobs=())
    rollouts = [
        a_rollout(0, 1.0, (a_call(), a_call("exec"), frozen)),
        a_rollout(1, 0.0, (a_call(parsed=False),)),
        a_rollout(2, 0.5, (a_call(), a_call("exec"), a_call("exec", 1, parsed=False))),
    ]
    groups = [
        Group(("e", "plan", 0), (Member(0, 0), Member(1, 0), Member(2, 0)), (1.0, 0.0, 0.5)),
        Group(("e", "exec", 0), (Member(0, 1), Member(2, 1)), (0.5, 0.5)),
        Group(("e", "exec", 1), (Member(2, 2),), (0.5,)),
    ]
    store.save_step(StepRecord(step=0, rollouts=rollouts, groups=groups))
    store.save_step(
        StepRecord(step=1, rollouts=rollouts[:1], groups=[Group(("f", "plan", 0), (Member(0, 0),), (1.0,))])
    )
    executor, judge, plan = store.module_table()
    assert (executor.module, executor.calls, executor.parse_failures) == ("exec", 4, 1)
    assert executor.reward == pytest.approx((1.0 + 0.5 + 0.5 + 1.0) / 4)
    assert (executor.groups, executor.silent) == (2, 2)
    assert (judge.adapter, judge.calls, judge.groups, judge.silent) == (None, 2, 0, 0)
    assert (plan.adapter, plan.calls, plan.parse_failures, plan.groups, plan.silent) == ("plan", 4, 1, 2, 1)
    assert plan.reward == pytest.approx((1.0 + 0.0 + 0.5 + 1.0) / 4)
    assert (plan.input_tokens, plan.output_tokens) == (12, 8)
    assert store.failures() == {"none": 4}


def test_validations_come_in_the_order_of_a_run(store: Store) -> None:
    after = Validation(label="after", step=1, scores=(1.0, 1.0), adapters={"plan": 2}, seconds=3.0)
    for made in (
        after,
        Validation(label="step", step=1, scores=(0.5,)),
        Validation(label="before", step=-1, scores=()),
    ):
        store.save_validation(made)
    store.save_validation(Validation(label="step", step=0, scores=(1 / 3, 0.0)))
    store.save_validation(Validation(label="step", step=1, scores=(0.75,)))
    found = store.validations()
    assert [(one.label, one.step) for one in found] == [("before", -1), ("step", 0), ("step", 1), ("after", 1)]
    assert found[1].scores == (1 / 3, 0.0)
    assert [one.mean for one in found] == pytest.approx([0.0, 1 / 6, 0.75, 1.0])
    assert found[3] == after


def test_discard_after_forgets_later_steps_only(store: Store) -> None:
    for step in range(3):
        store.save_step(StepRecord(step=step, rollouts=[a_rollout()], advantages={(0, 0): 1.0}))
        store.save_validation(Validation(label="step", step=step, scores=(1.0,)))
    store.save_step(StepRecord(step=0, phase="warm"))
    for label in ("before", "warm", "after"):
        store.save_validation(Validation(label=label, step=-1, scores=(0.0,)))
    store.discard_after(0)
    assert [(step.phase, step.step) for step in store.steps()] == [("warm", 0), ("train", 0)]
    assert [(one.label, one.step) for one in store.validations()] == [("before", -1), ("warm", -1), ("step", 0)]
    assert (store.rollouts(1), store.advantages(1)) == (None, {})
    store.discard_after(0, "warm")
    assert [(step.phase, step.step) for step in store.steps()] == [("warm", 0)]
    assert [one.label for one in store.validations()] == ["before"]
    assert store.module_table() == []


def test_costs_are_replaced_by_the_totals(store: Store) -> None:
    store.save_costs([Usage(model="b", calls=1), Usage(model="a", calls=2, input_tokens=5, dollars=0.125, seconds=2.0)])
    totals = [Usage(model="a", calls=3, input_tokens=6, dollars=0.25, seconds=3.0)]
    store.save_costs(totals)
    assert store.costs() == totals


def test_a_run_is_described_and_told_from_a_killed_one(store: Store) -> None:
    with store.lock():
        info = store.run()
        assert (info.name, info.optimizer, info.settings) == ("legs", "MMGRPO", {"steps": 3, "seed": 0})
        assert info.status == "running"
        assert abs(info.created - time.time()) < 60
    assert store.run().status == "interrupted"
    store.set_status("stopped", "Ctrl-C", seconds_left=12.5)
    store.set_status("done", seconds=3)
    after = store.run()
    assert (after.status, after.message, after.estimates) == ("done", "", {"seconds_left": 12.5, "seconds": 3})
    assert after.created == info.created


def test_runs_of_one_database_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = Store.create(tmp_path / "a", url="sqlite:///shared.db")
    second = Store.create(tmp_path / "b", url="sqlite:///shared.db")
    first.save_step(StepRecord(step=0, rollouts=[a_rollout()]))
    second.save_step(StepRecord(step=5, rollouts=[]))
    first.discard_after(-1)
    monkeypatch.chdir("/")
    with Store.open(tmp_path / "a") as a, Store.open(tmp_path / "b") as b:
        assert (a.last_done_step(), b.last_done_step()) == (None, 5)
    assert not (tmp_path / "a" / "run.db").exists()


def test_another_layout_is_refused_by_name(store: Store) -> None:
    marker = store.folder / "modpo.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "layout": 99}))
    with pytest.raises(RunVersionError, match="layout 99, this modpo reads layout 2"):
        Store.open(store.folder)


def test_a_database_with_runs_of_another_layout_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shared.db"
    Store.create(tmp_path / "a", url=url).save_run(RunInfo(name="old", optimizer="MMGRPO", layout=99))
    with pytest.raises(RunVersionError, match="layout 99"):
        Store.create(tmp_path / "b", url=url)


def test_bad_folders_and_databases_are_readable_errors(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="already holds a run"):
        Store.create(store.folder)
    with pytest.raises(StoreError, match="is not a run folder"):
        Store.open(tmp_path)
    with pytest.raises(StoreError, match="lives in memory"):
        Store.create(tmp_path / "m", url="sqlite://")
    with pytest.raises(StoreError, match="cannot use the database URL 'no url'"):
        Store.create(tmp_path / "m", url="no url")
    with pytest.raises(StoreError, match="cannot use the database"):
        Store.create(tmp_path / "m", url="nosuch://host/db")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot make the run folder"):
        Store.create(tmp_path / "file" / "run")
    with pytest.raises(StoreError, match="stopped before it began"):
        Store.create(tmp_path / "early").run()
    (store.folder / "run.db").write_bytes(b"not a database " * 1000)
    with pytest.raises(StoreError, match="cannot read the database .* not a database"):
        Store.open(store.folder)
    (store.folder / "run.db").unlink()
    with pytest.raises(StoreError, match="is gone"):
        Store.open(store.folder)
    (store.folder / "modpo.json").write_text("[]")
    with pytest.raises(StoreError, match="damaged"):
        Store.open(store.folder)


def test_the_marker_may_hold_a_password_and_is_private(store: Store) -> None:
    assert (store.folder / "modpo.json").stat().st_mode & 0o777 == 0o600


def test_runs_are_listed_with_the_broken_ones(store: Store, tmp_path: Path) -> None:
    store.save_step(StepRecord(step=0))
    store.save_step(StepRecord(step=1))
    store.save_validation(Validation(label="step", step=1, scores=(1.0, 0.0)))
    broken = Store.create(tmp_path / "zbroken")
    (broken.folder / "modpo.json").write_text("{}")
    (tmp_path / "no run").mkdir()
    listed = {run.folder.name: run for run in list_runs(tmp_path)}
    assert set(listed) == {"run", "zbroken"}
    assert (listed["run"].steps, listed["run"].score, listed["run"].info.status) == (2, 0.5, "interrupted")
    assert listed["zbroken"].info.status == "failed"
    assert "damaged" in listed["zbroken"].info.message
    assert list_runs(tmp_path / "absent") == []


def test_readers_and_writers_share_a_store_between_threads(store: Store) -> None:
    errors: list[Exception] = []

    def work(step: int) -> None:
        try:
            store.save_step(StepRecord(step=step, rollouts=[a_rollout()]))
            assert store.rollouts(step) == [stored(a_rollout())]
        except (StoreError, AssertionError) as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(step,)) for step in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert store.last_done_step() == 7
