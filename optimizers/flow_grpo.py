"""Flow-GRPO: one trajectory reward for every call of it (AgentFlow, arXiv 2510.05592)."""

from typing import ClassVar, final

from modpo.optimizers.grpo import WeightOptimizer


@final
class FlowGRPO(WeightOptimizer):
    """Compares an example's trajectories; the trajectory's advantage goes to each of its calls."""

    recipe_name: ClassVar[str] = "flow_grpo"
