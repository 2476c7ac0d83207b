"""Aggregation: how much each token counts, so that the loss is one weighted sum.

A weighted sum can be cut into packs of any shape and accumulated. All rows of an update take part in the
weights, also those whose advantage is 0: a row that teaches nothing still counts in the mean.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, assert_never

from modpo.errors import ConfigError

AggregationName = Literal["seq_mean_token_mean", "token_mean", "const", "trajectory"]


def token_weights(
    lengths_C: Sequence[int],
    kind: AggregationName,
    *,
    trajectories_C: Sequence[int] | None = None,
    max_tokens: int | None = None,
) -> list[float]:
    """The weight of each token of each row of an update.

    Args:
        lengths_C: [C] completion lengths in tokens, at least 1.
        kind: `seq_mean_token_mean` 1/(C L_i), the mean over rows of the mean over tokens (GRPO);
            `token_mean` 1/sum(L), the mean over all tokens (DAPO);
            `const` 1/(C max_tokens), which favours neither short nor long rows (Dr. GRPO);
            `trajectory` 1/(n T_i L_i) with n trajectories of T_i rows each (Flow-GRPO).
        trajectories_C: [C] which trajectory each row belongs to; needed by `trajectory`.
        max_tokens: the longest completion that sampling allows; needed by `const`.

    Returns: [C] one weight per row, shared by its tokens; weight times length adds up to 1 except for `const`.
    Raises: ConfigError when `const` has no `max_tokens`.
    Source: the papers named above, arXiv 2402.03300, 2503.14476, 2503.20783, 2510.05592 [C].
    """
    rows = len(lengths_C)
    match kind:
        case "seq_mean_token_mean":
            return [1 / (rows * length) for length in lengths_C]
        case "token_mean":
            tokens = sum(lengths_C)
            return [1 / tokens for _ in lengths_C]
        case "const":
            if max_tokens is None:
                raise ConfigError("aggregation 'const' divides by the longest completion allowed: give max_tokens")
            return [1 / (rows * max_tokens) for _ in lengths_C]
        case "trajectory":
            assert trajectories_C is not None
            turns = Counter(trajectories_C)
            return [
                1 / (len(turns) * turns[trajectory] * length)
                for trajectory, length in zip(trajectories_C, lengths_C, strict=True)
            ]
        case _:
            assert_never(kind)
