import threading
import time

import pytest

from modpo.errors import SamplerError
from modpo.lm.vllm.slots import AdapterSlots


class Server:
    """Keeps what is loaded, and notices a swap while somebody samples."""

    def __init__(self, size):
        self.loaded, self.log = [], []
        self.sampling = 0
        self.size = size
        self.slots = AdapterSlots(size, self.load, self.unload)

    def load(self, name):
        assert self.sampling == 0
        self.loaded.append(name)
        assert len(self.loaded) <= self.size
        self.log.append(f"+{name}")

    def unload(self, name):
        assert self.sampling == 0
        self.loaded.remove(name)
        self.log.append(f"-{name}")


def test_prepare_holds_these_and_no_others():
    server = Server(2)
    server.slots.prepare(["a@v1", "b@v1"])
    server.slots.prepare(["a@v2", "b@v1"])
    assert server.log == ["+a@v1", "+b@v1", "-a@v1", "+a@v2"]
    assert server.slots.held == ("b@v1", "a@v2")


def test_more_than_fit_are_prepared_as_far_as_there_are_slots():
    server = Server(2)
    server.slots.prepare(["a", "b", "c"])
    assert server.loaded == ["a", "b"]


def test_a_missing_one_is_swapped_in_for_the_oldest():
    server = Server(2)
    server.slots.prepare(["a", "b"])
    with server.slots.using("c"):
        assert server.loaded == ["b", "c"]


def test_requests_that_wait_are_admitted_together_and_none_starves():
    server, names = Server(2), ["a", "b", "c"] * 20
    together, most = threading.Lock(), []

    def ask(name):
        with server.slots.using(name):
            with together:
                server.sampling += 1
                most.append(server.sampling)
            assert name in server.loaded
            time.sleep(0.001)
            with together:
                server.sampling -= 1

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len(most) == 60
    assert max(most) > 1
    assert server.slots.swaps < 30


def test_the_base_needs_no_slot_but_waits_for_a_swap():
    server = Server(1)
    with server.slots.using(None):
        thread = threading.Thread(target=lambda: server.slots.prepare(["a"]), daemon=True)
        thread.start()
        time.sleep(0.02)
        assert server.loaded == []
    thread.join(10)
    assert server.loaded == ["a"]


def test_a_failed_load_reaches_the_one_who_asked_and_the_next_goes_on():
    def load(name):
        if name == "broken":
            raise SamplerError("no such adapter")

    slots = AdapterSlots(1, load, lambda _: None)
    with pytest.raises(SamplerError, match="no such adapter"):
        with slots.using("broken"):
            raise AssertionError
    with slots.using("sound"):
        assert slots.held == ("sound",)
