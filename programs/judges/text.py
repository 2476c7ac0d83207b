"""Judges of a text: equal to the right one, or the same number."""

import re
import string
import unicodedata
from fractions import Fraction

import dspy

from modpo.errors import ConfigError, MetricError
from modpo.programs.judges.fields import field_of
from modpo.task import Metric

_LEADING = "\"'`([{<*_~“”‘’«»„¿¡"
_TRAILING = ".,;:!?\"'`)]}>*_~“”‘’«»…"
_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_POWER = r"(?:[eE][+-]?\d+|\s?(?:\*|x|×|\\times)\s?10\^\{?[+-]?\d+\}?)"
_BELOW = rf"\s?/\s?({_DIGITS})(?!\.?\d|/)"
_NUMBER = re.compile(rf"(?<![\w./])(?:(?<![)\]])[+\-−])?[$€£]?({_DIGITS}{_POWER}?)(?:{_BELOW})?(\s?\\?%)?", re.ASCII)
_LONGEST, _LARGEST_EXPONENT = 200, 999  # what is longer or larger is no number that anyone asked for


def exact(field: str = "answer", normalise: bool = True) -> Metric:
    """Judge whether the prediction's field is the example's.

    Normalised (`normal`) both are compared without regard to case (Unicode's casefold after NFKC), to how much
    white space there is, and to punctuation around the whole: leading quotes, brackets and ``* _ ~``, trailing
    ones and ``. , ; : ! ?``. Signs, currency and per cent count: ``-5`` is not ``5``. An empty answer is wrong.

    Args:
        field: name of the field in the example and in the prediction.
        normalise: False compares the texts as they are.

    Returns:
        A metric of 1.0 or 0.0.
    """

    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> float:  # noqa: ARG001
        pair = str(field_of(example, field, "example")), str(field_of(prediction, field, "prediction"))
        right, given = map(normal, pair) if normalise else pair
        return float(right == given != "")

    return metric


def normal(text: str) -> str:
    """Normalise a text as `exact` says."""
    words = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return words.lstrip(_LEADING + string.whitespace).rstrip(_TRAILING + string.whitespace)


def numeric(field: str = "answer", rel_tol: float = 1e-6, abs_tol: float = 0.0) -> Metric:
    """Judge the last number in the prediction's field against the last in the example's.

    Numbers: ``1,234.5``, ``-3``, ``.5``, ``1.2e-3``, ``1.2 x 10^-3``, ``3/4`` and ``50%`` (the same as 0.5). A
    digit that follows a letter, as in ``H2``, begins no number. Both are exact fractions until they are compared.

    Args:
        field: name of the field in the example and in the prediction.
        rel_tol: largest difference as a part of the right number, 0 or more.
        abs_tol: largest difference, 0 or more; the larger of both counts.

    Returns:
        A metric of 1.0 or 0.0; a text without a number scores 0.

    Raises:
        ConfigError: a tolerance is below 0.
    """
    if not (rel_tol >= 0 and abs_tol >= 0):
        raise ConfigError(f"rel_tol={rel_tol}, abs_tol={abs_tol}; both must be 0 or more")
    relative, absolute = Fraction(rel_tol), Fraction(abs_tol)

    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> float:  # noqa: ARG001
        right = last_number(str(field_of(example, field, "example")))
        if right is None:
            raise MetricError(f"no number in the example's {field!r}, which is {example[field]!r}")
        given = last_number(str(field_of(prediction, field, "prediction")))
        return float(given is not None and abs(given - right) <= max(relative * abs(right), absolute))

    return metric


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text, as `numeric` reads numbers; None without one."""
    matches = list(_NUMBER.finditer(text))
    return number_of(matches[-1]) if matches else None


def whole_number(text: str) -> Fraction | None:
    """Return the number that a text is, apart from white space; None when it is anything else."""
    match = _NUMBER.fullmatch(text.strip())
    return number_of(match) if match else None


def number_of(match: re.Match[str]) -> Fraction | None:
    """Return the value of a number that was found; None when it is divided by 0, or too long or large."""
    value, below, percent = match.groups()
    if len(match[0]) > _LONGEST:
        return None
    mantissa = re.sub(r"\s?(?:\*|x|×|\\times)\s?10\^\{?([+-]?\d+)\}?", r"e\1", value).replace(",", "")
    _, _, exponent = mantissa.lower().partition("e")
    if exponent and abs(int(exponent)) > _LARGEST_EXPONENT:
        return None
    divisor = Fraction(below.replace(",", "")) if below else Fraction(1)
    if divisor == 0:
        return None
    sign = -1 if match[0][0] in "-−" else 1
    return sign * Fraction(mantissa) / divisor / (100 if percent else 1)
