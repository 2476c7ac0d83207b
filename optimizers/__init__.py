"""DSPy teleprompters over the engine; imported as `modpo.optimizers`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if __name__ != "modpo.optimizers":
    raise ImportError(f"import modpo.optimizers, not {__name__!r}: under two names each class would exist twice")

if TYPE_CHECKING:
    from modpo.optimizers.flow_grpo import FlowGRPO
    from modpo.optimizers.mmgrpo import MMGRPO

_HOME = {"FlowGRPO": "modpo.optimizers.flow_grpo", "MMGRPO": "modpo.optimizers.mmgrpo"}

__all__ = ["MMGRPO", "FlowGRPO"]


def __getattr__(name: str) -> Any:
    """Import an optimizer when it is first asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'modpo.optimizers' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    return getattr(import_module(_HOME[name]), name)
