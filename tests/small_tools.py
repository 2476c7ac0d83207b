"""Small tools for the tests of tools."""

from typing import Literal


def echo(text: str) -> str:
    """Say it back. Then stop.

    Returns:
        what was said
    """
    return text


def repeat(text: str, times: int, sep: str = "-") -> str:
    """Repeat a text."""
    return sep.join([text] * times)


def square(number: int) -> int:
    """Square a number."""
    return number * number


def halve(number: float) -> float:
    """Halve a number."""
    return number / 2


def negate(flag: bool) -> bool:
    """Negate."""
    return not flag


def pick(way: Literal["up", "down"]) -> str:
    """Pick a way."""
    return way


def total(numbers: list[int]) -> int:
    """Add numbers."""
    return sum(numbers)


def now() -> str:
    """Say when."""
    return "noon"
