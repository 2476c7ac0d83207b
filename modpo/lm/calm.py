"""What DSPy does for one program at a time, and must not do in many rollouts at once."""

import logging
from typing import Any, final
from weakref import WeakSet

from tqdm import tqdm

from modpo.lm.recorder import current_recorder


def calm_dspy() -> None:
    """Keep DSPy from warning of each cut-off answer in a rollout, and rollouts from tripping over its progress bars."""
    logging.getLogger("dspy.clients.lm").addFilter(_not_in_a_rollout)
    if not isinstance(tqdm._instances, _Bars):
        tqdm._instances = _Bars(tqdm._instances)


def _not_in_a_rollout(record: logging.LogRecord) -> bool:
    # a cut-off answer is ordinary data in a rollout
    return "truncated" not in record.getMessage() or current_recorder() is None


@final
class _Bars(WeakSet[Any]):
    """Progress bars, any of which may be gone already: `dspy.Parallel` clears tqdm's set whenever it starts.

    With several rollouts that use it, one clears the set while another's bar is about to leave it, and tqdm raises.
    """

    def remove(self, item: Any) -> None:
        """Remove a bar if it is there."""
        self.discard(item)
