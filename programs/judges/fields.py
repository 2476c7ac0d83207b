"""What judges read, and what they refuse."""

from typing import Any

import dspy

from modpo.errors import ConfigError, MetricError, nearest


def field_of(holder: Any, name: str, label: str) -> Any:
    """Return a field of an example or prediction.

    Raises:
        MetricError: it is not there, or None.
    """
    value = holder.get(name) if isinstance(holder, dspy.Example | dict) else getattr(holder, name, None)
    if value is None:
        names = list(holder.keys()) if isinstance(holder, dspy.Example | dict) else []
        raise MetricError(f"the {label} has no {name!r} to judge; {nearest(name, names)}")
    return value


def positive(timeout_s: float) -> None:
    """Refuse a time-out that is not above 0."""
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s={timeout_s!r}; it must be above 0 seconds")
