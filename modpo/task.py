"""A task: a program, its data and its metric; what the command line names."""

import importlib
import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import dspy

from modpo.config import read_toml
from modpo.errors import MetricError, TaskError, nearest

Metric = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A metric's answer: a finite number, with text and what it says of each turn where it says so."""

    score: float
    feedback: str | None = None
    turn_scores: tuple[float, ...] | None = None
    turn_states: tuple[str, ...] | None = None
    measures: dict[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """A program with the data and the metric that say what it is for.

    Attributes:
        program: the DSPy program to compile.
        metric: `metric(example, prediction, trace=None)`: a number, a bool, or a `dspy.Prediction` with `score` and
            perhaps `feedback`, `measures` (further numbers to report), and for turn credit `turn_scores` and
            `turn_states`; higher is better.
        trainset: examples to train on, with their inputs marked.
        valset: examples for choosing the best version.
        testset: examples held out from all of that.
        traces: verified inputs and outputs per module path, for the warm start.
        teacher: a program whose successful rollouts serve as traces.
        name: for people and for the run folder.
        optimizer: the optimizer to use when none is named.
        settings: options of the optimizer.
    """

    program: dspy.Module
    metric: Metric
    trainset: Sequence[dspy.Example]
    valset: Sequence[dspy.Example] | None = None
    testset: Sequence[dspy.Example] | None = None
    traces: Mapping[str, Sequence[dspy.Example]] | None = None
    teacher: dspy.Module | None = None
    name: str = "task"
    optimizer: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def load_task(target: str, arguments: Mapping[str, Any] | None = None) -> Task:
    """Load the task that a target names.

    Args:
        target: ``path/to/file.py:task``, ``package.module:task`` (a `Task`, or a function that returns one), or a
            TOML file with the keys target, optimizer, name, [arguments] (of that function) and [settings].
        arguments: keywords for the function.

    Raises:
        TaskError: there is no such file, module or attribute, it is no task, or it does not take the arguments.
        ConfigError: the TOML file cannot be read.
    """
    if target.endswith(".toml"):
        return _from_toml(Path(target))
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise TaskError(f"target {target!r} is none of: path/to/file.py:task, package.module:task, a .toml file")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_package(place)
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise TaskError(f"{place} has no {name!r}; {nearest(name, public)}")
    value = getattr(module, name)
    if inspect.isfunction(value):
        value = value(**_fitting(value, target, arguments or {}))
    elif arguments:
        raise TaskError(f"{target} takes no arguments: it is a {type(value).__name__} and not a function")
    if not isinstance(value, Task):
        raise TaskError(f"{target} is a {type(value).__name__}, not a modpo.Task or a function that returns one")
    return value


def _fitting(function: Callable[..., Any], target: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments, if the function can be called with them."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        advice = "give them under [arguments] in a TOML file" if not arguments else "mend [arguments]"
        raise TaskError(f"{target} cannot be called with {dict(arguments)}: {error}; {advice}") from None
    return arguments


def _from_toml(path: Path) -> Task:
    table = read_toml(path)
    allowed = ("target", "optimizer", "name", "arguments", "settings")
    for key in table:
        if key not in allowed:
            raise TaskError(f"unknown key {key!r} in {path}; {nearest(key, allowed)}")
    if not isinstance(table.get("target"), str) or table["target"].endswith(".toml"):
        raise TaskError(f'{path} needs a line like target = "file.py:task"')
    target = table["target"]
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        # Paths in a file are meant from where the file lies.
        target = f"{path.parent / place}:{name}"
    task = load_task(target, table.get("arguments"))
    settings = {**task.settings, **table.get("settings", {})}
    optimizer, name = table.get("optimizer", task.optimizer), table.get("name", task.name)
    return replace(task, optimizer=optimizer, name=name, settings=settings)


def _from_file(path: Path) -> Any:
    if not path.is_file():
        beside = [str(other) for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise TaskError(f"no such file: {path}; {nearest(str(path), beside)}")
    path = path.resolve()
    name = f"modpo_task_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TaskError(f"{path} cannot be read as a Python module")
    module = importlib.util.module_from_spec(spec)
    # Pickling, dataclasses and saved programs look classes up by module name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        hint = "is it installed, or is a path/to/file.py meant?"
        raise TaskError(f"no module {error.name!r} to import for {name!r}; {hint}") from error


def as_score(value: Any, where: str) -> Score:
    """Read a metric's answer.

    Args:
        value: a bool, a number, or a `dspy.Prediction` with `score` and perhaps `feedback`, `turn_scores` (a number a
            turn), `turn_states` (a text a turn, equal where turns started from the same), `measures` (named numbers).
        where: the example, for the message.

    Raises:
        MetricError: there is no finite number in it.
    """
    if not isinstance(value, dspy.Prediction):
        return Score(score=_finite(value, where))
    feedback, turns, states = value.get("feedback"), value.get("turn_scores"), value.get("turn_states")
    measures = value.get("measures")
    return Score(
        score=_finite(value.get("score"), where),
        feedback=None if feedback is None else str(feedback),
        turn_scores=None if turns is None else tuple(_finite(turn, where) for turn in turns),
        turn_states=None if states is None else tuple(map(str, states)),
        measures=None if measures is None else {str(name): _finite(one, where) for name, one in measures.items()},
    )


def _finite(value: Any, where: str) -> float:
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise MetricError(f"the metric returned {value!r} for {where}; it must return a finite number or a bool")
    number = float(value)
    if not math.isfinite(number):
        raise MetricError(f"the metric returned {number} for {where}; it must return a finite number or a bool")
    return number


def apply_metric(metric: Metric, example: dspy.Example, prediction: Any) -> Any:
    """Call a metric as DSPy's evaluation does; further arguments that it insists on (trace, ...) are None."""
    try:
        parameters = inspect.signature(metric).parameters.values()
    except (TypeError, ValueError):
        return metric(example, prediction)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [each for each in parameters if each.kind in kinds and each.default is inspect.Parameter.empty]
    return metric(example, prediction, *[None] * max(0, len(needed) - 2))


def prediction_text(prediction: Any) -> str:
    """A program's outputs as JSON text; what JSON does not know is written as Python writes it."""
    value = prediction.toDict() if isinstance(prediction, dspy.Prediction) else prediction
    try:
        return json.dumps(value, default=str, ensure_ascii=False)
    except (TypeError, ValueError):
        return repr(value)


def check_examples(program: dspy.Module, examples: Sequence[dspy.Example], label: str = "trainset") -> None:
    """Refuse a data set that is empty or whose examples lack inputs the program needs.

    Raises:
        TaskError: naming the first such example.
    """
    if len(examples) == 0:
        raise TaskError(f"{label} is empty: give at least one dspy.Example")
    needed, known = inputs_of(program)
    for index, example in enumerate(examples):
        where = f"example {index} of {label}"
        if not isinstance(example, dspy.Example):
            raise TaskError(f"{where} is a {type(example).__name__}, not a dspy.Example")
        try:
            given = set(example.inputs().keys())
        except ValueError:
            raise TaskError(f"{where} does not say which fields are inputs: use .with_inputs(...)") from None
        for name in needed:
            if name not in given:
                hint = " (the field is there but not marked by .with_inputs)" if name in example else ""
                has = ", ".join(sorted(given)) or "nothing"
                raise TaskError(f"{where} lacks the input {name!r} that the program needs{hint}; it has {has}")
        for name in given:
            if known is not None and name not in known:
                raise TaskError(f"{where} has an input {name!r} that the program does not take; {nearest(name, known)}")


def inputs_of(program: dspy.Module) -> tuple[list[str], set[str] | None]:
    """Inputs a program needs, and all that it takes; None when it takes any."""
    if isinstance(program, dspy.Predict):
        fields = program.signature.input_fields
        return [name for name, info in fields.items() if info.is_required()], None
    parameters = list(inspect.signature(type(program).forward).parameters.values())[1:]
    named = [each for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    needed = [each.name for each in named if each.default is each.empty]
    takes_any = any(each.kind == each.VAR_KEYWORD for each in parameters)
    if takes_any and not named and isinstance(signature := getattr(program, "signature", None), type):
        return list(getattr(signature, "input_fields", {})), None
    return needed, None if takes_any else {each.name for each in named}
