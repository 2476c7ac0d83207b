"""Names of people, firms and towns that no model has read of."""

import random
from collections.abc import Callable

_ENDS = ("ane", "ex", "ima", "or")
_FIRMS = ("Mills", "Works", "Press", "Lines", "Bank", "Foods")
_PLACES = ("ford", "holm", "burg", "mouth", "wick", "dale")


class Names:
    """Invents names, none twice; people share first and last names, so that a part of one fits others too.

    Args:
        rng: draws them.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._used: set[str] = set()
        self._first = [self._root(1) + end for end in ("a", "o", "i", "en", "us", "ia") for _ in range(8)]
        self._last = [self._root(2) for _ in range(400)]

    def person(self) -> str:
        """A first and a last name."""
        return self._new(lambda: f"{self._rng.choice(self._first)} {self._rng.choice(self._last)}")

    def firm(self) -> str:
        """A word and what the firm is."""
        return self._new(lambda: f"{self._root(2)}{self._rng.choice(_ENDS)} {self._rng.choice(_FIRMS)}")

    def town(self) -> str:
        """One word."""
        return self._new(lambda: f"{self._root(2)}{self._rng.choice(_PLACES)}")

    def _root(self, syllables: int) -> str:
        parts = [self._rng.choice("bdfgklmnprstvz") + self._rng.choice("aeiou") for _ in range(syllables)]
        return "".join([*parts, self._rng.choice("lmnrst")]).capitalize()

    def _new(self, draw: Callable[[], str]) -> str:
        while (name := draw()) in self._used:
            pass
        self._used.add(name)
        return name
