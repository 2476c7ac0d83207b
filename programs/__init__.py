"""DSPy programs and their tools; imported as `modpo.programs`."""

from typing import TYPE_CHECKING, Any

if __name__ != "modpo.programs":
    raise ImportError(f"import modpo.programs, not {__name__!r}: under two names each class would exist twice")

if TYPE_CHECKING:
    from modpo.programs.agentflow import AgentFlow as AgentFlow

_PLACES = {"AgentFlow": "modpo.programs.agentflow"}
__all__ = ["AgentFlow"]


def __getattr__(name: str) -> Any:
    """Load a program when it is first asked for."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)
