"""Reading files within a fence."""

import copy
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from modpo.errors import ToolError
from modpo.programs.tools import FileReader, as_tool

SECRET = "the secret"


@pytest.fixture
def fence(tmp_path: Path) -> Path:
    (tmp_path / "secret.txt").write_text(SECRET)
    fence = tmp_path / "fence"
    (fence / "notes").mkdir(parents=True)
    (fence / "a.txt").write_text("hello\nworld\n")
    (fence / "notes/b.txt").write_text("grüße")
    return fence


def test_files_within_are_read_and_listed(fence: Path) -> None:
    reader = FileReader(fence)
    assert reader.read_file("a.txt") == "hello\nworld\n"
    assert reader.read_file(" ./notes//b.txt\n") == "grüße"
    assert reader.list_files() == "a.txt\nnotes/b.txt"
    assert reader.list_files("notes") == "notes/b.txt"
    (fence / "empty").mkdir()
    assert reader.list_files("empty") == "no files"
    assert copy.deepcopy(reader) is reader


def test_they_are_tools(fence: Path) -> None:
    read, files = as_tool(FileReader(fence).read_file), as_tool(FileReader(fence).list_files)
    assert read.describe() == "read_file(path: string) -> the text of the file: Read a text file."
    assert files.describe() == (
        'list_files(folder: string = "") -> paths, one a line: List the files of a folder and of the folders in it.'
    )
    assert read.run("a.txt").text == "hello\nworld\n"
    assert files.run("").text == "a.txt\nnotes/b.txt"
    assert files.run("notes").text == "notes/b.txt"
    result = read.run("../secret.txt")
    assert (result.error, SECRET in result.text) == (True, False)


@pytest.mark.parametrize(
    "path",
    [
        "../secret.txt",
        "notes/../../secret.txt",
        "/etc/passwd",
        "",
        ".",
        "notes",
        "a.txt/b",
        "no.txt",
        "a\x00b",
        "x" * 999,
    ],
)
def test_what_is_no_file_within_is_refused(fence: Path, path: str) -> None:
    with pytest.raises(ToolError):
        FileReader(fence).read_file(path)
    assert str(fence) not in as_tool(FileReader(fence).read_file).run(path).text


def test_links_are_not_followed(fence: Path) -> None:
    (fence / "link.txt").symlink_to(fence.parent / "secret.txt")
    (fence / "folder").symlink_to(fence.parent)
    (fence / "loop").symlink_to(fence / "loop")
    reader = FileReader(fence)
    for path, message in [
        ("link.txt", "'link.txt' is a link"),
        ("folder/secret.txt", "'folder' is no folder here"),
        ("loop", "'loop' is a link"),
        ("loop/a", "'loop' is no folder here"),
    ]:
        with pytest.raises(ToolError, match=message):
            reader.read_file(path)
    assert reader.list_files() == "a.txt\nnotes/b.txt"
    with pytest.raises(ToolError, match="'folder' is no folder here"):
        reader.list_files("folder")
    assert FileReader(fence / "folder/fence").read_file("a.txt") == "hello\nworld\n"


def test_a_link_that_is_swapped_in_between_check_and_open_is_not_followed(
    fence: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, swapped = os.stat, []

    def look_then_swap(name: Any, *args: Any, **options: Any) -> os.stat_result:
        found = look(name, *args, **options)
        if name == "a.txt":
            (fence / "a.txt").unlink()
            (fence / "a.txt").symlink_to(fence.parent / "secret.txt")
            swapped.append(name)
        return found

    monkeypatch.setattr(os, "stat", look_then_swap)
    with pytest.raises(ToolError, match="cannot read 'a.txt'"):
        FileReader(fence).read_file("a.txt")
    assert swapped == ["a.txt"]


def test_a_folder_that_is_swapped_for_a_link_is_not_followed(fence: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fence.parent / "b.txt").write_text(SECRET)
    look = os.stat

    def swap_then_look(name: Any, *args: Any, **options: Any) -> os.stat_result:
        if name == "b.txt" and (fence / "notes").is_dir() and not (fence / "old").exists():
            (fence / "notes").rename(fence / "old")
            (fence / "notes").symlink_to(fence.parent)
        return look(name, *args, **options)

    monkeypatch.setattr(os, "stat", swap_then_look)
    assert FileReader(fence).read_file("notes/b.txt") == "grüße"  # of the folder that was opened
    with pytest.raises(ToolError, match="'notes' is no folder here"):
        FileReader(fence).read_file("notes/b.txt")


def test_special_files_are_refused_at_once(fence: Path) -> None:
    os.mkfifo(fence / "pipe")
    with socket.socket(socket.AF_UNIX) as local:
        local.bind(os.path.relpath(fence / "socket"))
        for name, message in [("pipe", "is a pipe"), ("socket", "is a socket")]:
            with pytest.raises(ToolError, match=message):
                FileReader(fence).read_file(name)
        assert FileReader(fence).list_files() == "a.txt\nnotes/b.txt"
    with pytest.raises(ToolError, match="is a device"):
        FileReader("/dev").read_file("null")


def test_a_pipe_that_is_swapped_in_does_not_hang(fence: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = os.stat

    def look_then_swap(name: Any, *args: Any, **options: Any) -> os.stat_result:
        found = look(name, *args, **options)
        if name == "a.txt":
            (fence / "a.txt").unlink()
            os.mkfifo(fence / "a.txt")
        return found

    monkeypatch.setattr(os, "stat", look_then_swap)
    with pytest.raises(ToolError, match="is a pipe"):
        FileReader(fence).read_file("a.txt")


@pytest.mark.parametrize("data", [b"\x89PNG\r\n", b"zero \x00 byte", b"caf\xe9", b"cut short \xc3"])
def test_binary_files_are_refused(fence: Path, data: bytes) -> None:
    (fence / "data").write_bytes(data)
    with pytest.raises(ToolError, match="'data' is not text"):
        FileReader(fence).read_file("data")


def test_what_is_too_long_is_cut_with_a_mark(fence: Path) -> None:
    (fence / "long.txt").write_text("€" * 1000)
    reader = FileReader(fence, max_chars=12)
    assert reader.read_file("long.txt") == "€" * 12 + "\n[cut: only the first 12 characters of 3000 bytes are shown]"
    assert reader.read_file("a.txt") == "hello\nworld\n"
    assert reader.list_files() == "a.txt\n[cut: there are more]"


def test_no_descriptor_is_left_open(fence: Path) -> None:
    reader = FileReader(fence)
    before = len([*Path("/dev/fd").iterdir()])
    for path in ("a.txt", "notes/b.txt", "no.txt", "no/no.txt", "notes"):
        as_tool(reader.read_file).run(path)
        as_tool(reader.list_files).run(path)
    assert len([*Path("/dev/fd").iterdir()]) == before


def test_a_fence_must_be_a_folder(fence: Path) -> None:
    for folder in (fence / "a.txt", fence / "none"):
        with pytest.raises(ToolError, match="no such folder"):
            FileReader(folder)
    with pytest.raises(ToolError, match="give 1 or more"):
        FileReader(fence, max_chars=0)
