"""A time-out for any metric."""

import contextvars
import threading
from concurrent.futures import Future
from typing import Any

import dspy

from modpo.errors import JudgeTimeoutError
from modpo.programs.judges.fields import positive
from modpo.task import Metric, apply_metric


def within(metric: Metric, timeout_s: float) -> Metric:
    """Give a metric up when it takes too long.

    Each call runs in a thread of its own, with the caller's context (DSPy's settings). One that hangs is left
    behind: Python cannot end a thread, so what it does goes on and what it returns is lost.

    Args:
        metric: any metric.
        timeout_s: for one call, in seconds, above 0.

    Returns:
        A metric that gives what `metric` gives or raises, or raises `JudgeTimeoutError`; a rollout judged by it
        then fails as one that ran out of time.

    Raises:
        ConfigError: the time-out is not above 0.
    """
    positive(timeout_s)

    def timed(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> Any:
        answer: Future[Any] = Future()

        def work() -> None:
            try:
                value = metric(example, prediction, trace) if trace else apply_metric(metric, example, prediction)
            except BaseException as error:  # noqa: BLE001 - raised in the thread that asked
                answer.set_exception(error)
            else:
                answer.set_result(value)

        run = contextvars.copy_context().run
        threading.Thread(target=run, args=(work,), name="judge", daemon=True).start()
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            if answer.done():  # the metric's own
                raise
            name = getattr(metric, "__name__", type(metric).__name__)
            raise JudgeTimeoutError(f"the judge {name!r} took longer than {timeout_s:g} s") from None

    return timed
