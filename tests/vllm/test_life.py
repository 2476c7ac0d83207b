"""A real server's life: it dies in the middle of a step, or its owner does."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import modpo
from modpo.errors import SamplerError
from modpo.optimizers import MMGRPO
from modpo.store import Store
from tests.e2e.model import policy, program, right, trainset
from tests.test_vllm_process import alive, until
from tests.vllm.conftest import SLOTS, server_settings
from tests.vllm_double import ROOT

pytestmark = pytest.mark.vllm
STEP = 16  # rollouts: 4 examples, 4 samples


def compiled(student, metric, run, **options):
    optimizer = MMGRPO(
        metric, run_folder=run, steps=3, examples_per_step=4, rollouts_per_example=4, learning_rate=5e-3, threads=4,
        validate_every=None, seed=1, quiet=True, **options,
    )  # fmt: skip
    return optimizer.compile(student, trainset=trainset())


def sampled(run, step):
    """What a step's rollouts drew, by example and sample."""
    with Store.open(run) as store:
        return {
            (each.example, each.sample): [(call.version, call.completion_ids) for call in each.calls]
            for each in store.rollouts(step)
        }


def test_a_server_killed_in_the_middle_of_a_step_loses_nothing(narrow_base, server, tmp_path):
    run, lock, scored = tmp_path / "run", threading.Lock(), []
    first = policy(narrow_base, sampler=server_settings())

    def killing(example, prediction, trace=None):
        with lock:
            scored.append(example)
            if len(scored) == 1 + STEP + STEP // 2:  # the first is the probe of the metric
                os.killpg(first.sampler.process.pid, signal.SIGKILL)
        return right(example, prediction)

    with pytest.raises(SamplerError, match="is gone.*resume the run"):
        compiled(program(first), killing, run)
    first.sampler.close()
    kept = sampled(run, 1)
    assert STEP // 2 - 1 <= len(kept) < STEP

    second = policy(narrow_base, sampler=modpo.VLLM(url=server, max_loras=SLOTS))
    compiled(program(second), right, run, resume=True)
    second.sampler.close()
    whole = sampled(run, 1)
    assert len(whole) == STEP
    assert kept.items() <= whole.items()
    assert [{version for calls in sampled(run, step).values() for version, _ in calls} for step in range(3)] == [
        {0}, {1}, {2},
    ]  # fmt: skip


OWNER = """
import sys, time
from pathlib import Path
from modpo.preflight import preflight
from tests.e2e.model import policy
from tests.vllm.conftest import server_settings

sampler_policy = policy(sys.argv[1], sampler=server_settings("--logprobs-mode", "raw_logprobs"))
sampler_policy.sampler.open(Path(sys.argv[2]))
report = preflight(sampler_policy, Path(sys.argv[2]))
print([check.cause for check in report.checks if not check.ok], flush=True)
print(sampler_policy.sampler.process.pid, flush=True)
time.sleep(600)
"""


def test_raw_logprobs_are_named_and_a_killed_owner_leaves_no_process(narrow_base, tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(narrow_base), str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    try:
        assert "--logprobs-mode processed_logprobs" in owner.stdout.readline()
        group = processes(int(owner.stdout.readline()))
        assert len(group) > 1  # vLLM's engine is a process beside its interface
        owner.kill()
        owner.wait(30)
        until(lambda: not any(map(alive, group)), 60)
    finally:
        owner.kill()
        owner.stdout.close()
        owner.wait(30)


def processes(group):
    """Ids of a process group's processes."""
    stats = {int(file.parent.name): file.read_text() for file in Path("/proc").glob("[0-9]*/stat")}
    return [pid for pid, stat in stats.items() if int(stat.rpartition(")")[2].split()[2]) == group]
