"""modpo: write a DSPy program; from one metric, modpo compiles it.

The package is lazy: nothing heavy (torch, transformers, dspy) is imported until a name needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modpo.config import VLLM, Budget, LoRA, Settings, WarmStart
    from modpo.credit.recipe import recipe
    from modpo.lm.policy import Policy
    from modpo.lm.policy_lm import PolicyLM
    from modpo.lm.serving import connect
    from modpo.task import Task

__version__ = "0.1.0"

_HOME = {
    "Budget": "modpo.config",
    "LoRA": "modpo.config",
    "Policy": "modpo.lm.policy",
    "PolicyLM": "modpo.lm.policy_lm",
    "Settings": "modpo.config",
    "Task": "modpo.task",
    "VLLM": "modpo.config",
    "WarmStart": "modpo.config",
    "connect": "modpo.lm.serving",
    "recipe": "modpo.credit.recipe",
}

__all__ = [
    "VLLM",
    "Budget",
    "LoRA",
    "Policy",
    "PolicyLM",
    "Settings",
    "Task",
    "WarmStart",
    "__version__",
    "connect",
    "recipe",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'modpo' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """List the lazy names too."""
    return __all__
