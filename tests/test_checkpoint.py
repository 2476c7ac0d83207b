import errno

import pytest
from safetensors import SafetensorError

from modpo.errors import StoreError
from modpo.train import checkpoint
from modpo.train.checkpoint import write_folder


def put(text):
    def fill(folder):
        (folder / "a.txt").write_text(text)
        (folder / "inner").mkdir()

    return fill


def listed(root):
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*"))


def test_a_folder_appears_whole_with_its_parents(tmp_path):
    write_folder(tmp_path / "adapters" / "v1", put("new"))
    assert listed(tmp_path) == ["adapters", "adapters/v1", "adapters/v1/a.txt", "adapters/v1/inner"]
    assert (tmp_path / "adapters" / "v1" / "a.txt").read_text() == "new"


def test_a_folder_that_was_there_is_replaced_with_all_it_held(tmp_path):
    folder = tmp_path / "v1"
    folder.mkdir()
    (folder / "stale.txt").touch()
    write_folder(folder, put("new"))
    assert listed(folder) == ["a.txt", "inner"]


def test_what_a_dead_attempt_of_this_process_left_does_not_get_in(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.os, "getpid", lambda: 7)
    (tmp_path / ".v1.7.tmp").mkdir()
    (tmp_path / ".v1.7.tmp" / "stale.txt").touch()
    write_folder(tmp_path / "v1", put("new"))
    assert listed(tmp_path) == ["v1", "v1/a.txt", "v1/inner"]


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), StoreError),
        (SafetensorError("I/O error: No space left on device"), StoreError),
        (ValueError("a bug"), ValueError),
    ],
)
def test_a_failing_fill_leaves_the_old_folder_and_nothing_else(failure, raised, tmp_path):
    folder = tmp_path / "v1"
    write_folder(folder, put("old"))

    def fill(work):
        (work / "a.txt").write_text("half")
        raise failure

    with pytest.raises(raised) as caught:
        write_folder(folder, fill)
    if raised is StoreError:
        assert "No space left" in str(caught.value)
        assert "the last version is whole" in str(caught.value)
    assert listed(tmp_path) == ["v1", "v1/a.txt", "v1/inner"]
    assert (folder / "a.txt").read_text() == "old"


def test_a_disk_that_fills_up_while_flushing_leaves_the_old_folder(tmp_path, monkeypatch):
    folder = tmp_path / "v1"
    write_folder(folder, put("old"))

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(StoreError, match="cannot write"):
        write_folder(folder, put("new"))
    assert (folder / "a.txt").read_text() == "old"
    assert listed(tmp_path) == ["v1", "v1/a.txt", "v1/inner"]


def test_a_file_where_a_folder_should_be_is_a_store_error(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(StoreError, match="cannot write"):
        write_folder(tmp_path / "run" / "v1", put("new"))


def test_every_file_is_flushed_before_the_folder_gets_its_name(tmp_path, monkeypatch):
    folder, flushed = tmp_path / "v1", []
    plain = checkpoint._flush
    monkeypatch.setattr(checkpoint, "_flush", lambda path: flushed.append((path.name, folder.exists())) or plain(path))
    write_folder(folder, put("new"))
    assert flushed[:2] == [("a.txt", False), ("inner", False)]
    assert flushed[2][1] is False
    assert flushed[3] == (tmp_path.name, True)
