"""A compiled program, saved the DSPy way, answers token for token as before in a new process."""

import json
import subprocess
import sys

import pytest

from modpo.errors import PolicyError
from tests.e2e.cli import environment
from tests.e2e.model import Guess, calls_of, heldout

ANSWER = """
import json, sys
from tests.e2e.model import Guess, calls_of, heldout
program = Guess()
program.load(sys.argv[1], allow_unsafe_lm_state=True)
print(json.dumps([program.plan.lm.model, calls_of(program, heldout()[:12])]))
"""


def elsewhere(path, **more):
    """Model name and calls of a saved program in a new process."""
    command = [sys.executable, "-c", ANSWER, str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(**more), check=False, cwd=more.get("PWD")
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_new_process_gives_the_same_tokens(trained, tmp_path):
    trained.compiled.save(str(tmp_path / "program.json"))
    name, calls = elsewhere(tmp_path / "program.json")
    assert name == trained.compiled.plan.lm.model
    assert calls == calls_of(trained.compiled, heldout()[:12])
    assert calls != [call for call in trained.before if call][: len(calls)]


def test_the_run_folder_may_have_moved_under_the_runs_folder(trained, tmp_path):
    text = json.dumps(_saved(trained, tmp_path)).replace(str(trained.run.parent), "/nowhere")
    (tmp_path / "moved.json").write_text(text)
    _, calls = elsewhere(tmp_path / "moved.json", MODPO_RUNS=str(trained.run.parent))
    assert calls == calls_of(trained.compiled, heldout()[:12])


def test_a_run_folder_that_is_gone_is_named(trained, tmp_path):
    text = json.dumps(_saved(trained, tmp_path)).replace(str(trained.run.parent), "/nowhere")
    (tmp_path / "lost.json").write_text(text)
    program = Guess()
    with pytest.raises(PolicyError, match="run folder of this program is not at /nowhere/run"):
        program.load(str(tmp_path / "lost.json"), allow_unsafe_lm_state=True)


def test_loading_asks_for_leave(trained, tmp_path):
    trained.compiled.save(str(tmp_path / "program.json"))
    with pytest.raises(Exception, match="allow_unsafe_lm_state"):
        Guess().load(str(tmp_path / "program.json"))


def test_a_pickled_program_holds_no_weights(trained, base):
    import cloudpickle

    data = cloudpickle.dumps(trained.compiled)
    assert len(data) < (base / "model.safetensors").stat().st_size / 2
    assert calls_of(cloudpickle.loads(data), heldout()[:4]) == calls_of(trained.compiled, heldout()[:4])


def _saved(trained, tmp_path):
    trained.compiled.save(str(tmp_path / "program.json"))
    return json.loads((tmp_path / "program.json").read_text())
