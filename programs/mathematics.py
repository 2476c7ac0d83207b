"""Whether two mathematical expressions are equal, asked of worker processes that are killed when they hang.

Workers import this module and not dspy, so that they start quickly. They are spawned: a script that judges by
them has its doings under ``if __name__ == "__main__":``, as every user of Python's multiprocessing.
"""

import atexit
import contextlib
import math
import os
import re
import threading
from functools import lru_cache
from typing import Any

from modpo.errors import JudgeTimeoutError, MetricError

WORKERS = min(4, os.cpu_count() or 1)
TASKS_PER_WORKER = 500  # sympy's caches grow: a worker is replaced after so many
START_S = 180.0  # a worker imports sympy, on a slow disk too
MEMORY_BYTES = 4 << 30
_ORPHAN_S = 60  # processor time that a worker outlives its time-out by if nobody is left to kill it
_DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[|\\begin")
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|exp|log|ln|pi"
_BARE_FUNCTION = re.compile(rf"(?<![\\A-Za-z])({_FUNCTIONS})(?![A-Za-z])")
_WORD = re.compile(
    rf"(?<![\\A-Za-z])(?!(?:{_FUNCTIONS}|sqrt)(?![A-Za-z]))(?:[A-Za-z]{{3,}}|(?:is|or|so|it)(?![A-Za-z]))"
)
_FORMS = r"such as $\frac{1}{2}$, or bare, such as x^2 + 1"
_lock = threading.Lock()
_pools: list[Any] = []


def equal(reference: str, answer: str, timeout_s: float) -> bool:
    """Say whether an answer equals a reference, by math-verify in a worker process.

    Args:
        reference: the right expression, see `read`.
        answer: text that holds the expression to judge, see `read`.
        timeout_s: for this comparison, in seconds, once a worker has begun it; then the worker is killed.

    Raises:
        JudgeTimeoutError: it took longer.
        MetricError: there is no expression in the reference, or the workers cannot start or were killed by another.
    """
    from pebble import ProcessExpired

    future = _pool().schedule(_equal, args=(reference, answer, timeout_s), timeout=timeout_s)
    try:
        verdict: bool | None = future.result()
    except TimeoutError:
        shown = answer if len(answer) <= 80 else f"{answer[:80]}..."
        raise JudgeTimeoutError(f"comparing {reference!r} with {shown!r} took longer than {timeout_s:g} s") from None
    except ProcessExpired as error:
        raise MetricError(f"the process that compared {reference!r} with {answer[:80]!r} died: {error}") from None
    if verdict is None:
        raise MetricError(f"no mathematical expression in the example's {reference!r}; write it as LaTeX, {_FORMS}")
    return verdict


def _pool() -> Any:
    """The pool of this process, made when first needed; one that did not start is not tried again."""
    with _lock:
        if not _pools:
            try:
                _pools.append(_started())
            except MetricError as error:
                _pools.append(error)
    if isinstance(_pools[0], MetricError):
        raise MetricError(str(_pools[0])) from _pools[0].__cause__
    return _pools[0]


def _started() -> Any:
    """A pool that has been seen to answer.

    A script without the guard of `__main__` would start its workers anew forever: it is stopped here.
    """
    import multiprocessing

    from pebble import ProcessPool

    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPool(max_workers=WORKERS, max_tasks=TASKS_PER_WORKER, initializer=_prepare, context=spawn)
    try:
        pool.schedule(_equal, args=("1", "1", START_S)).result(timeout=START_S)
    except Exception as error:
        _stop(pool)
        raise MetricError(
            f"the processes that compare expressions do not start ({error!r}); is what your script does under "
            "if __name__ == '__main__': ?"
        ) from error
    atexit.register(_stop, pool)
    return pool


def _stop(pool: Any) -> None:
    """End the workers, whatever they do."""
    pool.stop()
    pool.join()


def _prepare() -> None:
    """Get a worker ready: what only the first comparison needs, imports above all, is not part of its time."""
    import logging
    import resource

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that no time-out of its own is set
    with contextlib.suppress(ValueError, OSError):  # not every system has such a limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    _equal("x + 1/2", r"$\frac{2x + 1}{2}$", START_S)


def _equal(reference: str, answer: str, timeout_s: float) -> bool | None:
    """Compare, in a worker; None when there is nothing in the reference."""
    import resource

    from math_verify import verify

    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + timeout_s) + _ORPHAN_S
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    right = read(reference)
    return bool(verify(right, read(answer), timeout_seconds=None)) if right else None


@lru_cache(maxsize=1024)
def read(text: str) -> Any:
    r"""Find the expression in a text: what math-verify parses, as a list of its readings.

    LaTeX between ``$``, ``\(``, ``\[`` or in ``\boxed`` is found in any text; of several, the last counts. A text
    without any words (``x**2 + sin(x)``, ``\frac{1}{2}``) is read as one expression. In prose without LaTeX only
    a number is found: one that is said to be the answer, else the last.
    """
    from math_verify import parse

    if not _DELIMITED.search(text) and not _WORD.search(text):
        bare = _BARE_FUNCTION.sub(r"\\\1", text.replace("**", "^"))
        found = parse(f"${bare}$", parsing_timeout=None)
        if any(not isinstance(each, str) for each in found):
            return found
    return parse(text, parsing_timeout=None)
