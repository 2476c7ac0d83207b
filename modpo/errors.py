"""The error tree: every mistake a user can make or meet, named by the boundary it crossed.

A message says what was given, what is allowed and how to mend it. `ModpoError`s are shown as one
line by the command line (exit code 2). `RolloutFailure`s never leave a rollout: they are data.
"""

import difflib
from collections.abc import Iterable


class ModpoError(Exception):
    """Something the user can mend; the message says how.

    Attributes:
        rollouts: the rollouts that had ended when the error stopped the others, for the caller to keep.
    """

    rollouts: tuple[object, ...] = ()


class ConfigError(ModpoError):
    """An option has a value, or a name, that is not allowed."""


class TaskError(ModpoError):
    """The program, its examples or its metric cannot be used as given."""


class MetricError(TaskError):
    """The metric returned no finite number, lacks what it judges by, or raised too often."""


class PolicyError(ModpoError):
    """A base model, an adapter or a sampler setting cannot be used as given."""


class SamplerError(ModpoError):
    """Sampling infrastructure failed: the run stops with everything kept."""


class StoppedError(ModpoError):
    """Sampling was told to stop; what had ended is kept."""


class ToolError(ModpoError):
    """A tool cannot be set up as given, or its command cannot be read; inside a rollout it is data."""


class StoreError(ModpoError):
    """The run folder or its database cannot be read or written."""


class RunVersionError(StoreError):
    """The run was written by another version of the store's layout."""


class RunLockedError(StoreError):
    """Another process is working on this run."""


class BudgetError(ModpoError):
    """A money, token or time budget is spent: checked before the call that would pass it."""


class RolloutFailure(Exception):  # noqa: N818 - a failure inside a rollout is data, not an error of ours
    """A failure inside one rollout; recorded with the failure reward, never raised to the user."""


class PromptTooLongError(RolloutFailure):
    """The rendered prompt leaves no room in the model's context."""


class RolloutTimeoutError(RolloutFailure):
    """The rollout ran past its time-out; its thread is refused further calls."""


class JudgeTimeoutError(RolloutTimeoutError):
    """A judge did not answer within its time-out; the rollout that it judged fails as one that ran out of time."""


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Say what is allowed and which allowed name is nearest to the one given."""
    names = sorted(allowed)
    close = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"allowed: {', '.join(names) or 'nothing'}{hint}"
