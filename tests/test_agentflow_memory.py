"""The memory's bounds, with a token per character."""

from modpo.programs.agentflow import Entry, Memory

CUT = " … [cut]"


def long(turn: int, tool: str = "t" * 99) -> Entry:
    return Entry(turn=turn, tool=tool, sub_goal="g" * 99, command="c" * 99, result="r" * 99)


def test_every_text_of_an_entry_is_cut() -> None:
    kept = Memory(len, 100, 20).add(long(1))
    assert [kept.tool, kept.sub_goal, kept.command, kept.result] == [letter * 12 + CUT for letter in "tgcr"]
    assert kept.cut
    assert not Memory(len, 100, 20).add(Entry(turn=1, tool="t" * 20, sub_goal="g" * 20)).cut


def test_the_last_entry_is_condensed_and_at_last_cut_where_it_alone_passes_the_whole() -> None:
    memory = Memory(len, 100, 60)
    for turn in (1, 2, 3):
        memory.add(long(turn, "add"))
    memory.note("odd")
    assert memory.render() == "(turns 1 to 2 left out)\n3. add -> " + "r" * 52 + CUT + " (odd)"
    assert (memory.condensed, memory.left_out) == (1, 2)
    small = Memory(len, 40, 40)
    small.add(long(1, "add"))
    assert small.render() == "1. add -> " + "r" * 22 + CUT
    assert (small.condensed, small.left_out) == (1, 0)


def test_what_fits_stays_whole() -> None:
    memory = Memory(len, 100, 60)
    assert memory.render() == "(empty)"
    memory.add(Entry(turn=1, tool="add", sub_goal="sum", command="1, 2", result="3"))
    assert memory.render() == "1. sum; add: 1, 2 -> 3"
    assert (memory.condensed, memory.left_out) == (0, 0)
