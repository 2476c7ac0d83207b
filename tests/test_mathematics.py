import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dspy
import pytest

from modpo.errors import ConfigError, JudgeTimeoutError, MetricError
from modpo.programs import mathematics
from modpo.programs.judges import symbolic
from modpo.rollout import run
from tests.scripted import Simple, as_policy, jobs_for, slow_echo

ROOT = Path(__file__).resolve().parents[1]
TOWER = "9^{9^{9^9}}"  # sympy would compute it
SLOW_S = 60.0  # for a machine that does other things


def judged(right, given, timeout_s=SLOW_S):
    return symbolic(timeout_s=timeout_s)(dspy.Example(answer=right), dspy.Prediction(answer=given))


@pytest.mark.parametrize(
    ("right", "given", "score"),
    [
        ("1/2", r"The answer is $\frac{2}{4}$.", 1.0),
        ("1/2", "0.5", 1.0),
        ("1/2", "The answer is 0.5", 1.0),
        ("x^2 + 2x + 1", r"so it is \boxed{(x+1)^2}", 1.0),
        ("x^2 + 2x + 1", "(x+1)**2", 1.0),
        ("x + 1", "1", 0.0),
        ("sin(x)**2 + cos(x)**2", "1", 1.0),
        ("sqrt(8)", r"$2\sqrt{2}$", 1.0),
        ("1,000", "1000", 1.0),
        ("6", "It was 5 and became 6", 1.0),
        ("6", "", 0.0),
    ],
)
def test_equal_is_what_is_mathematically_equal(right, given, score):
    assert judged(right, given) == score


def test_a_reference_without_an_expression_is_said():
    with pytest.raises(MetricError, match="no mathematical expression in the example's 'blue'; write it as LaTeX"):
        judged("blue", "1")
    with pytest.raises(ConfigError, match="timeout_s=-1"):
        symbolic(timeout_s=-1)


def test_one_that_hangs_is_killed_and_the_next_is_answered():
    judged("1", "1")  # the workers run
    start = time.monotonic()
    with pytest.raises(JudgeTimeoutError, match="comparing '1' with .* took longer than 1 s"):
        judged("1", TOWER, timeout_s=1.0)
    assert time.monotonic() - start < SLOW_S
    assert judged("2", "4/2") == 1.0


def test_64_threads_judge_at_once_and_the_hung_ones_are_data():
    metric = symbolic(timeout_s=8.0)
    judged("1", "1")

    def outcome(index):
        try:
            answer = TOWER if index % 32 == 0 else str(index % 2)
            return metric(dspy.Example(answer="1"), dspy.Prediction(answer=answer))
        except JudgeTimeoutError:
            return "late"

    with ThreadPoolExecutor(64) as threads:
        outcomes = list(threads.map(outcome, range(64)))
    assert outcomes == ["late" if index % 32 == 0 else float(index % 2) for index in range(64)]


def test_a_hung_comparison_inside_a_run_is_a_time_out():
    judged("1", "1")
    compare = symbolic(timeout_s=5.0)

    def metric(example, prediction, trace=None):
        given = TOWER if example.tag == "e0" else "1"
        return compare(dspy.Example(answer="1"), dspy.Prediction(answer=given))

    program = Simple()
    rollouts = run(jobs_for(3), program=program, metric=metric, sampler=as_policy(program, slow_echo).sampler)
    assert [(each.failure, each.reward) for each in rollouts] == [("timeout", 0.0), (None, 1.0), (None, 1.0)]


def dies(reference, answer, timeout_s):
    os._exit(3)


def test_a_worker_that_dies_is_said(monkeypatch):
    judged("1", "1")
    monkeypatch.setattr(mathematics, "_equal", dies)
    with pytest.raises(MetricError, match="the process that compared '1' with '1' died"):
        judged("1", "1")
    monkeypatch.undo()
    assert judged("1", "1") == 1.0


HANGS = """
import threading, time
import dspy
from modpo.programs.judges import symbolic

if __name__ == "__main__":
    metric = symbolic(timeout_s=600)
    ask = lambda answer: metric(dspy.Example(answer="1"), dspy.Prediction(answer=answer))
    print(ask("1"), flush=True)
    for _ in range(8):
        threading.Thread(target=ask, args=("9^{9^{9^9}}",), daemon=True).start()
    time.sleep(1)
"""


def script(tmp_path, text):
    file = tmp_path / "script.py"
    file.write_text(text)
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(file)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done, time.monotonic() - start


def test_leaving_python_does_not_wait_for_what_hangs(tmp_path):
    done, seconds = script(tmp_path, HANGS)
    assert (done.returncode, done.stdout) == (0, "1.0\n"), done.stderr
    assert seconds < 120  # the comparisons had ten minutes


def test_a_script_without_its_guard_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    text = HANGS.replace('if __name__ == "__main__":', "if True:").replace("import threading", "import threading, os")
    text = text.replace("if True:", "from modpo.programs import mathematics\nmathematics.START_S = 20\nif True:")
    done, _ = script(tmp_path, text)
    assert done.returncode == 1
    assert "if __name__ == '__main__': ?" in done.stderr.splitlines()[-1]
