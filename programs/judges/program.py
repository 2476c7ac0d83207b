"""Judges that are DSPy programs, or an LM."""

import re
from typing import Any

import dspy

from modpo.errors import MetricError, TaskError, nearest
from modpo.programs.judges.fields import positive
from modpo.programs.judges.text import normal, whole_number
from modpo.programs.judges.timing import within
from modpo.programs.xml import XMLPredict
from modpo.task import Metric, inputs_of

_LABEL = "example_"
_VERDICTS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
_OPENING = re.compile(r"(yes|no|true|false)\s*[,.;:!()\-–—]")
INSTRUCTIONS = "Does the answer agree with the right one, example_answer? Say yes or no."


def judged_by(program: dspy.Module, score: str = "score", timeout_s: float | None = None) -> Metric:
    """Judge by a DSPy program.

    Its inputs are taken by name: from the prediction; else from the example's marked inputs; an input that is
    called ``example_NAME`` is the example's NAME, its label too. A label has no other way in, so that a run
    without an answer is not judged by the right one. The program is shared by all threads, as DSPy's evaluation
    shares it: its `forward` keeps nothing on `self`.

    Args:
        program: each output but `score` and `feedback` is ignored.
        score: the output that gives the score: a bool, a number of 0 .. 1 (also as text, ``7/10`` or ``70%``), or
            a text that is or begins with yes, no, true or false.
        timeout_s: see `within`; None for no limit.

    Returns:
        A metric of 0 .. 1, with the program's output `feedback` where it has one. It raises `MetricError` when an
        input is missing or the score cannot be read, and what the program raises.

    Raises:
        TaskError: the judge is no program, or its signature has no such output.
        ConfigError: the time-out is not above 0.
    """
    if not isinstance(program, dspy.Module):
        raise TaskError(f"the judge is a {type(program).__name__}, not a dspy.Module")
    outputs = getattr(getattr(program, "signature", None), "output_fields", None)
    if outputs is not None and score not in outputs:
        raise TaskError(f"the judge has no output {score!r}; {nearest(score, outputs)}; name it with score=")
    needed, _ = inputs_of(program)

    def judge(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> Any:  # noqa: ARG001
        verdict = program(**{name: _input(name, example, prediction) for name in needed})
        if verdict.get(score) is None:
            raise MetricError(f"the judge gave no {score!r}; {nearest(score, verdict.keys())}; name it with score=")
        value = read_score(verdict[score])
        feedback = verdict.get("feedback")
        return value if feedback is None else dspy.Prediction(score=value, feedback=str(feedback))

    return judge if timeout_s is None else within(judge, timeout_s)


def lm_judge(
    lm: Any,
    instructions: str = INSTRUCTIONS,
    *,
    inputs: tuple[str, ...] = ("question", "example_answer", "answer"),
    timeout_s: float | None = None,
) -> Metric:
    """Judge by an LM that answers one short prompt, by default with yes or no.

    Args:
        lm: a `dspy.LM`, or a policy's; what it should not be is the very policy that is being trained.
        instructions: the question to it. It may ask for yes or no, or for a number of 0 .. 1.
        inputs: what it sees, found as `judged_by` finds inputs.
        timeout_s: see `within`; None for no limit.

    Returns:
        A metric of 0 .. 1. It raises `MetricError` for an answer that is no verdict, and DSPy's AdapterParseError
        for one that has not the form.

    Raises:
        TaskError: this is no LM.
        ConfigError: the time-out is not above 0.
    """
    if not isinstance(lm, dspy.BaseLM):
        raise TaskError(f"the judge's LM is a {type(lm).__name__}, not a dspy.LM or the LM of a policy")
    if timeout_s is not None:
        positive(timeout_s)
    judge = XMLPredict(dspy.Signature(f"{', '.join(inputs)} -> verdict", instructions))
    judge.set_lm(lm)
    return judged_by(judge, score="verdict", timeout_s=timeout_s)


def read_score(value: Any) -> float:
    """Read a judge's score.

    Args:
        value: see `judged_by`.

    Raises:
        MetricError: it is none of those, or a number outside of 0 .. 1.
    """
    number: Any = value
    if isinstance(value, str):
        text = normal(value)
        opening = _OPENING.match(text)
        number = _VERDICTS.get(opening[1] if opening else text, whole_number(text))
    # numpy's numbers too; not a number is not within 0 .. 1
    if not hasattr(number, "__float__") or not 0 <= number <= 1:
        raise MetricError(f"the judge's score is {value!r}; it must be a bool, a number of 0 .. 1, or yes or no")
    return float(number)


def _input(name: str, example: dspy.Example, prediction: Any) -> Any:
    """The value of a judge's input, see `judged_by`."""
    given = dict(prediction.items()) if isinstance(prediction, dspy.Example) else {}
    try:
        asked = example.inputs()
    except ValueError:
        raise MetricError("the example does not say which fields are inputs: use .with_inputs(...)") from None
    for fields in (given, asked):
        if fields.get(name) is not None:
            return fields[name]
    if name.startswith(_LABEL) and example.get(name.removeprefix(_LABEL)) is not None:
        return example[name.removeprefix(_LABEL)]
    labels = [f"{_LABEL}{label}" for label in example.keys()]  # noqa: SIM118 - an Example iterates otherwise
    raise MetricError(
        f"the judge's input {name!r} is in none of these; {nearest(name, [*given, *asked.keys(), *labels])}"
    )
