"""Judges of an outcome: metrics that a task takes as they are.

Each function here returns `metric(example, prediction, trace=None)`, a float of 0 .. 1 or a
`dspy.Prediction(score, feedback)`. They keep no state and may be called from any number of threads. What cannot be
judged, such as an example without the field, raises `MetricError`: in a rollout that is data.
"""

from modpo.programs.judges.library import reasoning_gym, symbolic
from modpo.programs.judges.program import judged_by, lm_judge
from modpo.programs.judges.text import exact, numeric
from modpo.programs.judges.timing import within

__all__ = ["exact", "judged_by", "lm_judge", "numeric", "reasoning_gym", "symbolic", "within"]
