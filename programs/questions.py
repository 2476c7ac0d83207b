"""Questions of reasoning-gym, drawn so that two seeds share none by index."""

from typing import Any

STRIDE = 10_000_019  # reasoning-gym seeds question i with seed + i: keeps two seeds' questions apart


def data_set(name: str, seed: int, **options: Any) -> Any:
    """Make a data set of reasoning-gym with `STRIDE` questions, each made when it is asked for by its index."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=seed * STRIDE, size=STRIDE, **options)
