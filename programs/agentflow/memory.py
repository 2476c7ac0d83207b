"""The memory of one question: what each turn did, in a bounded number of tokens."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, final

CUT = " … [cut]"
EMPTY = "(empty)"
_CHARS_PER_TOKEN = 16  # no token of a text is longer on average: more need not be counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one turn did.

    Attributes:
        turn: which turn, from 1.
        tool: the tool that was chosen; empty where no plan could be read.
        sub_goal: what for.
        command: what it was told.
        result: what came of it, an error's text included.
        error: whether it went wrong: no such plan or tool, a bad command, a tool that failed.
        cut: whether a text of it was longer than shown.
        note: what went wrong later in the turn.
    """

    turn: int
    tool: str = ""
    sub_goal: str = ""
    command: str = ""
    result: str = ""
    error: bool = False
    cut: bool = False
    note: str = ""

    def full(self) -> str:
        """All of it, on as many lines as it has."""
        goal = f"{self.sub_goal}; " if self.sub_goal else ""
        call = f"{self.tool}: {self.command}" if self.command else self.tool
        arrow = f"{call} -> " if call else ""
        note = f" ({self.note})" if self.note else ""
        return f"{self.turn}. {goal}{arrow}{'error: ' * self.error}{self.result}{note}"

    def condensed(self) -> str:
        """Only what it came to."""
        return f"{self.turn}. {self.tool or 'no plan'} -> {'error' if self.error else self.result}"


@final
class Memory:
    """Entries in order, rendered within a budget.

    Each text of an entry is cut to `max_result_tokens`, with a mark that shows it. When the whole passes `max_tokens`,
    the oldest entries are condensed to tool and result, then left out, with a mark too; the last entry stays whole
    unless it alone passes them: then it is condensed, and cut at last. `condensed` and `left_out` count them.

    Args:
        count: how many tokens a text has.
        max_tokens: of all that `render` gives.
        max_result_tokens: of one command, result, sub-goal or tool's name.
    """

    def __init__(self, count: Callable[[str], int], max_tokens: int, max_result_tokens: int) -> None:
        self._count = count
        self._max_tokens = max_tokens
        self._max_result_tokens = max_result_tokens
        self.entries: list[Entry] = []
        self.condensed = 0
        self.left_out = 0

    def add(self, entry: Entry) -> Entry:
        """Keep an entry, cut to its budget; returns it as kept."""
        texts = (entry.tool, entry.sub_goal, entry.command, entry.result)
        tool, goal, command, result = (self._fit(text, self._max_result_tokens) for text in texts)
        cut = (tool, goal, command, result) != texts
        self.entries.append(replace(entry, tool=tool, sub_goal=goal, command=command, result=result, cut=cut))
        return self.entries[-1]

    def note(self, text: str) -> None:
        """Say more of the last entry."""
        self.entries[-1] = replace(self.entries[-1], note=text)

    def render(self) -> str:
        """The memory as text for a prompt."""
        lines = [entry.full() for entry in self.entries]
        last = len(lines) - 1
        self.condensed = self.left_out = 0
        for at in range(last):
            if self._count("\n".join(lines)) <= self._max_tokens:
                break
            lines[at] = self.entries[at].condensed()
            self.condensed = at + 1
        while self.left_out < last and self._count("\n".join(self._marked(lines))) > self._max_tokens:
            self.left_out += 1
        self.condensed = max(self.condensed - self.left_out, 0)
        text = "\n".join(self._marked(lines)) or EMPTY
        if self._count(text) > self._max_tokens and self.entries:
            lines[last] = replace(self.entries[last], sub_goal="", command="").full()
            self.condensed += 1
            text = self._fit("\n".join(self._marked(lines)), self._max_tokens)
        return text

    def record(self) -> list[dict[str, Any]]:
        """The entries as JSON-able data."""
        return [asdict(entry) for entry in self.entries]

    def _marked(self, lines: list[str]) -> list[str]:
        if not self.left_out:
            return lines
        turns = "turn 1" if self.left_out == 1 else f"turns 1 to {self.left_out}"
        return [f"({turns} left out)", *lines[self.left_out :]]

    def _fit(self, text: str, limit: int) -> str:
        """The text, or as much of its beginning as leaves room for the mark."""
        short = text[: limit * _CHARS_PER_TOKEN]
        if short == text and self._count(text) <= limit:
            return text
        low, high = 0, len(short)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._count(short[:middle] + CUT) <= limit else (low, middle - 1)
        return short[:low] + CUT
