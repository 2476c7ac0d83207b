"""A run behind a server: `modpo serve`, and a saved program that answers through it."""

import json
import signal
import subprocess
import sys

import httpx
import pytest

import modpo
from modpo.errors import StoreError
from modpo.lm.serving import serve
from modpo.lm.vllm.process import free_port
from modpo.store import Store
from tests.e2e.model import Guess, heldout, policy, program, right, trainset
from tests.vllm_double import ROOT, python_that_runs_it


def test_a_saved_program_answers_through_the_server_as_it_did(trained, tmp_path):
    trained.compiled.save(str(tmp_path / "program.json"))
    expected = [trained.compiled(q=example.q).r for example in heldout()]
    command = [sys.executable, "-c", "from modpo.cli import main; main()", "serve", str(trained.run), "--json"]
    command += ["--port", str(free_port())]
    served = subprocess.Popen(
        [*command, "--python", str(python_that_runs_it(tmp_path)), "--max-model-len", "512"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT, text=True,
    )  # fmt: skip
    try:
        about = json.loads(served.stdout.readline())
        assert set(about["models"]) == {
            f"{name}@v{version}" for name, version in trained.optimizer.result.versions.items()
        }
        loaded = Guess()
        loaded.load(str(tmp_path / "program.json"), allow_unsafe_lm_state=True)
        through = modpo.connect(loaded, about["url"])
        assert [through(q=example.q).r for example in heldout()] == expected
        names = [model["id"] for model in httpx.get(about["url"] + "/v1/models").json()["data"]]
        assert set(about["models"].values()) < set(names)
        for predictor in through.predictors():
            assert "model" not in predictor.lm.policy._loaded[0].__dict__  # no weights were read here
            predictor.lm.policy.sampler.close()
    finally:
        served.send_signal(signal.SIGINT)
        assert served.wait(30) == 0
        served.stdout.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(about["url"] + "/health")


def test_a_program_trains_against_a_server_that_it_starts(base, tmp_path):
    settings = modpo.VLLM(python=python_that_runs_it(tmp_path))
    student = program(policy(base, sampler=settings))
    optimizer = modpo.optimizers.MMGRPO(
        right, run_folder=tmp_path / "run", steps=3, examples_per_step=8, rollouts_per_example=8, learning_rate=5e-3,
        seed=1, quiet=True,
    )  # fmt: skip
    optimizer.compile(student, trainset=trainset(), valset=heldout())
    with Store.open(tmp_path / "run") as store:
        versions = [{c.version for r in store.rollouts(step) for c in r.calls} for step in range(3)]
    assert versions == [{0}, {1}, {2}]
    assert json.loads((tmp_path / "run" / "preflight.json").read_text())["agree"]
    assert "ready" in (tmp_path / "run" / "vllm.log").read_text()
    student.plan.lm.policy.sampler.close()


def test_a_run_without_a_trained_adapter_has_nothing_to_serve(tmp_path):
    with pytest.raises(StoreError, match="nothing to serve"):
        serve(tmp_path, {"plan": 0}, modpo.VLLM())
