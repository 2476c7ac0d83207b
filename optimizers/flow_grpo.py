"""Flow-GRPO: one trajectory reward for every call of it (AgentFlow, arXiv 2510.05592)."""

from collections.abc import Mapping
from typing import Any, ClassVar, final

from modpo.optimizers.grpo import WeightOptimizer


@final
class FlowGRPO(WeightOptimizer):
    """Compares an example's trajectories; the trajectory's advantage goes to each of its calls.

    Credit by turn is a matter of the recipe: `gtpo`, `gigpo` or `gagpo` in place of `flow_grpo`.

    Attributes:
        PAPER: settings of the paper [P]: 8 rollouts of 32 examples, clip 0.2 and 0.3, KL 0.001, temperature 0.5. Its
            rate of 1e-6 is for all weights of a 7B model; a LoRA wants one that is 10 to 100 times as large.
        PUBLIC_CODE: the same, with the advantages normalised over calls as the public code does [C], so that long
            trajectories weigh more.
    """

    recipe_name: ClassVar[str] = "flow_grpo"
    PAPER: ClassVar[Mapping[str, Any]] = {
        "examples_per_step": 32,
        "rollouts_per_example": 8,
        "temperature": 0.5,
        "learning_rate": 1e-6,
        "recipe_options": {"clip_low": 0.2, "clip_high": 0.3, "kl": 0.001},
    }
    PUBLIC_CODE: ClassVar[Mapping[str, Any]] = {
        **PAPER,
        "recipe_options": {**PAPER["recipe_options"], "normalise_over": "calls"},
    }
