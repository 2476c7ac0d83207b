"""A calculator."""

import re

_ARITHMETIC = re.compile(r"[0-9+\-*/%(). ]{1,120}")
_LARGEST_BASE = 1_000_000
_LARGEST_EXPONENT = 32


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    It is over numbers, and code is never run. Only digits, ``+ - * / // % **``, brackets, dots and spaces are let
    through to the evaluator, at most 120 of them, and powers are bounded: no text can name, call or exhaust anything.

    Args:
        expression: such as ``"3 * 8 + 2 * 4"``.

    Returns:
        The value in decimal; a whole number has no fraction part (``"32"``).

    Raises:
        ValueError: the text is no such expression, or has no finite value.
    """
    from simpleeval import InvalidExpression, SimpleEval

    if not _ARITHMETIC.fullmatch(expression.strip()):
        raise ValueError(f"no arithmetic expression of at most 120 characters: {expression[:120]!r}")
    evaluator = SimpleEval(operators=_operators(), functions={}, names={})
    try:
        value = evaluator.eval(expression.strip())
        whole = int(value)
    except (InvalidExpression, ArithmeticError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"cannot evaluate {expression[:120]!r}: {error}") from None
    return str(whole) if whole == value else str(value)


def _operators() -> dict[type, object]:
    """Return what the evaluator may do: plain arithmetic, with a bounded power."""
    import ast
    import operator

    return {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
        ast.Pow: _power,
        ast.UAdd: operator.pos,
        ast.USub: operator.neg,
    }


def _power(base: float, exponent: float) -> float:
    """Raise to a power whose digits fit on a line."""
    if abs(base) > _LARGEST_BASE or abs(exponent) > _LARGEST_EXPONENT:
        raise ArithmeticError(f"power too large: base up to {_LARGEST_BASE}, exponent up to {_LARGEST_EXPONENT}")
    result: float = base**exponent
    if isinstance(result, complex):
        raise ArithmeticError("a root of a negative number")
    return result
