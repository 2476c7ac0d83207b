"""Judges by libraries: math-verify and reasoning-gym."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import dspy

from modpo.errors import MetricError, TaskError, nearest
from modpo.programs.judges.fields import field_of, positive
from modpo.programs.mathematics import equal
from modpo.task import Metric


def symbolic(field: str = "answer", timeout_s: float = 10.0) -> Metric:
    r"""Judge whether the prediction's field is mathematically equal to the example's, by math-verify.

    What is read of a text is said at `modpo.programs.mathematics.read`: LaTeX in ``$...$`` or ``\boxed{...}``
    anywhere, or a bare expression. Comparing runs in processes, shared by all threads and killed when they hang;
    they are spawned, so that a script needs ``if __name__ == "__main__":`` around what it does.

    Args:
        field: name of the field in the example and in the prediction.
        timeout_s: for one comparison, in seconds, waiting for a free process not included.

    Returns:
        A metric of 1.0 or 0.0; it raises `JudgeTimeoutError` where the comparison hangs.

    Raises:
        TaskError: math-verify or pebble is not installed.
    """
    for package, name in (("math_verify", "math-verify"), ("pebble", "pebble")):
        _need(package, name, "symbolic")
    positive(timeout_s)

    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> float:  # noqa: ARG001
        right, given = field_of(example, field, "example"), field_of(prediction, field, "prediction")
        return float(equal(str(right), str(given), timeout_s))

    return metric


def reasoning_gym(dataset: str | None = None, field: str = "answer") -> Metric:
    """Judge as reasoning-gym scores answers of one of its data sets.

    The scorer is given the example's ``question``, its right answer and its ``metadata`` where it has one; many
    data sets score by the latter.

    Args:
        dataset: name of the data set; None takes it from each example's field ``dataset``.
        field: name of the field in the example and in the prediction.

    Returns:
        A metric of 0 .. 1; some data sets give part of the score for a part of the answer.

    Raises:
        TaskError: reasoning-gym is not installed.
        MetricError: there is no such data set.
    """
    _need("reasoning_gym", "reasoning-gym", "reasoning_gym")
    if dataset is not None:
        _scorer(dataset)

    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> float:  # noqa: ARG001
        score = _scorer(str(dataset or field_of(example, "dataset", "example")))
        entry = {name: example.get(name) for name in ("question", "metadata") if name in example}
        entry = {"metadata": {}, **entry, "answer": field_of(example, field, "example")}
        return float(score(answer=field_of(prediction, field, "prediction"), entry=entry))

    return metric


@cache
def _scorer(dataset: str) -> Callable[..., float]:
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    if dataset not in DATASETS:
        raise MetricError(f"reasoning-gym has no data set {dataset!r}; {nearest(dataset, DATASETS)}")
    scorer: Callable[..., float] = get_score_answer_fn(dataset)
    return scorer


def _need(package: str, name: str, judge: str) -> None:
    if find_spec(package) is None:
        raise TaskError(f"{judge}() needs the package {name}: pip install 'modpo[judges]'")
