"""What can be known to be wrong before any work is done, and the traces of the warm start."""

from collections.abc import Mapping, Sequence

import dspy

from modpo.config import Settings
from modpo.errors import ConfigError, TaskError, nearest
from modpo.lm.binding import Binding
from modpo.lm.policy_lm import replay
from modpo.lm.recorder import stamp_paths
from modpo.records import Call
from modpo.task import Metric, apply_metric, as_score, check_examples

Traces = Mapping[str, Sequence[dspy.Example]]


def check(
    metric: Metric,
    program: dspy.Module,
    binding: Binding,
    settings: Settings,
    data: Mapping[str, Sequence[dspy.Example] | None],
) -> None:
    """Refuse data, metric and settings that cannot work.

    Raises:
        TaskError: an empty or unfit data set.
        MetricError: the metric, probed on one example, returned no finite number.
        ConfigError: a learning rate for an adapter that does not exist.
    """
    for label, examples in data.items():
        if label == "trainset" or examples:
            check_examples(program, examples or (), label)
    probe(metric, (data["trainset"] or ())[0])
    if isinstance(settings.learning_rate, dict):
        for name in settings.learning_rate:
            if name not in binding.names:
                raise ConfigError(f"learning_rate names the adapter {name!r}; {nearest(name, binding.names)}")
        for name in binding.names:
            if name not in settings.learning_rate:
                raise ConfigError(f"learning_rate has no rate for the adapter {name!r}; add it")


def probe(metric: Metric, example: dspy.Example) -> None:
    """Score an example's own labels: a metric that gives no finite number is found out before the run."""
    try:
        value = apply_metric(metric, example, dspy.Prediction(**example.labels()))
    except Exception:  # noqa: BLE001 - labels need not be a whole prediction; a metric that raises is data later
        return
    as_score(value, "example 0")


def replay_all(program: dspy.Module, binding: Binding, traces: Traces) -> dict[str, list[Call]]:
    """Turn written traces into calls, through the path that sampling takes.

    Raises:
        TaskError: a trace is of an unknown or frozen module, or lacks a field.
    """
    for path in traces:
        if path not in binding.adapters:
            raise TaskError(f"traces name the module {path!r}, which is not trained; {nearest(path, binding.adapters)}")
    return {path: [replay(program, path, one, binding.policy) for one in shown] for path, shown in traces.items()}


def traces_of(
    teacher: dspy.Module, trainset: Sequence[dspy.Example], metric: Metric, modules: Sequence[str], threshold: float
) -> dict[str, list[dspy.Example]]:
    """Inputs and outputs of each module in the teacher's successful runs on the training set.

    Args:
        teacher: a program whose modules have the student's paths.
        threshold: least score of a successful run.

    Raises:
        TaskError: a trained module is missing in the teacher, or no run succeeded.
    """
    paths = {id(predictor): path for path, predictor in stamp_paths(teacher).items()}
    for path in modules:
        if path not in paths.values():
            raise TaskError(f"the teacher has no module {path!r}; {nearest(path, paths.values())}")
    found: dict[str, list[dspy.Example]] = {path: [] for path in modules}
    for example in trainset:
        for path, shown in _successful(teacher, example, metric, paths, threshold):
            if path in found:
                found[path].append(shown)
    if not any(found.values()):
        raise TaskError(f"no run of the teacher on {len(trainset)} examples scored {threshold} or more; check it alone")
    return found


def _successful(
    teacher: dspy.Module, example: dspy.Example, metric: Metric, paths: Mapping[int, str], threshold: float
) -> list[tuple[str, dspy.Example]]:
    with dspy.context(trace=[]):
        try:
            prediction = teacher(**example.inputs())
            score = as_score(apply_metric(metric, example, prediction), "a teacher's run").score
        except Exception:  # noqa: BLE001 - a teacher's failed run teaches nothing
            return []
        trace = list(dspy.settings.trace)
    if score < threshold:
        return []
    return [
        (paths[id(predictor)], dspy.Example(**inputs, **dict(outputs)).with_inputs(*inputs))
        for predictor, inputs, outputs in trace
        if id(predictor) in paths
    ]
