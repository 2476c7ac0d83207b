"""mmGRPO: GRPO over the k-th calls of each module (arXiv 2508.04660)."""

from typing import ClassVar, final

from modpo.optimizers.grpo import WeightOptimizer


@final
class MMGRPO(WeightOptimizer):
    """Compares, on one example, the k-th calls of one module; every call gets the program's score."""

    recipe_name: ClassVar[str] = "mmgrpo"
