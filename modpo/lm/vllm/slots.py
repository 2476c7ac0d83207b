"""Which adapters a server holds: at most so many, and swapped only while nothing is being sampled."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final


@dataclass(slots=True, eq=False)
class _Ticket:
    """A request that waits for its adapter."""

    name: str | None
    admitted: bool = False


@final
class AdapterSlots:
    """Admits requests so that their adapters always fit the server.

    A request whose adapter is held goes ahead unless others wait for a swap. A swap waits until no request is under
    way (loading while others decode has mixed adapters up in vLLM: vllm#47724), takes the adapters that the waiting
    requests want in the order in which they came, and lets all requests for these go ahead together.

    Args:
        size: most adapters that the server holds.
        load: tells the server to hold an adapter, by the name it is served under.
        unload: tells it to drop one.
    """

    def __init__(self, size: int, load: Callable[[str], None], unload: Callable[[str], None]) -> None:
        self.size = size
        self.swaps = 0
        self._load, self._unload = load, unload
        self._changed = threading.Condition()
        self._held: list[str] = []
        self._queue: deque[_Ticket] = deque()
        self._users = 0

    @property
    def held(self) -> tuple[str, ...]:
        """The adapters that the server holds, oldest first."""
        return tuple(self._held)

    @contextmanager
    def using(self, name: str | None) -> Iterator[None]:
        """Hold an adapter, or None for the base, while a request is under way; raises what `load` raises."""
        self._enter(name)
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def prepare(self, names: Sequence[str]) -> None:
        """Hold these adapters, as far as there are slots, and no others: between two phases of sampling."""
        with self._changed:
            while self._users:
                self._changed.wait()
            self._swap(names[: self.size], keep=False)

    def _enter(self, name: str | None) -> None:
        with self._changed:
            if self._ready(name) and not self._queue:
                self._users += 1
                return
            ticket = _Ticket(name)
            self._queue.append(ticket)
            try:
                while not ticket.admitted:
                    if self._queue[0] is ticket and not self._users:
                        self._admit()
                    else:
                        self._changed.wait()
            except BaseException:
                if not ticket.admitted:
                    self._queue.remove(ticket)
                self._changed.notify_all()
                raise

    def _ready(self, name: str | None) -> bool:
        return name is None or name in self._held

    def _admit(self) -> None:
        """Swap in what the waiting requests want, first come first, and let those go ahead."""
        wanted = dict.fromkeys(ticket.name for ticket in self._queue if ticket.name is not None)
        self._swap(list(wanted)[: self.size], keep=True)
        admitted = [ticket for ticket in self._queue if self._ready(ticket.name)]
        self._queue = deque(ticket for ticket in self._queue if not self._ready(ticket.name))
        for ticket in admitted:
            ticket.admitted = True
        self._users += len(admitted)
        self._changed.notify_all()

    def _swap(self, wanted: Sequence[str], *, keep: bool) -> None:
        """Load what is wanted; drop what is in its way, oldest first, and without `keep` all that is not wanted."""
        missing = [name for name in wanted if name not in self._held]
        spare = [name for name in self._held if name not in wanted]
        excess = len(self._held) + len(missing) - self.size
        for name in spare[: max(excess, 0)] if keep else spare:
            self._unload(name)
            self._held.remove(name)
        for name in missing:
            self._load(name)
            self._held.append(name)
            self.swaps += 1
