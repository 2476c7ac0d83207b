"""Files of one folder, read by models; nothing outside of it can be reached."""

import codecs
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, final

from modpo.errors import ToolError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY  # opening a pipe must not wait for its other end


@final
class FileReader:
    """Reads files within a folder; its tools are `as_tool(reader.read_file)` and `as_tool(reader.list_files)`.

    Each part of a path is opened relative to the one before, and no link is ever followed, so that nothing which is
    swapped in meanwhile leads outside. What a hard link names counts as lying within.

    Args:
        folder: the fence.
        max_chars: most characters that a tool returns, and a mark where there are more.

    Raises:
        ToolError: there is no such folder, or max_chars is below 1.
    """

    def __init__(self, folder: str | os.PathLike[str], max_chars: int = 4000) -> None:
        self.folder = Path(folder).resolve()
        if not self.folder.is_dir():
            raise ToolError(f"FileReader({str(folder)!r}): there is no such folder; give one that exists")
        if max_chars < 1:
            raise ToolError(f"FileReader(max_chars={max_chars!r}) would read nothing: give 1 or more")
        self.max_chars = max_chars

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self

    def read_file(self, path: str) -> str:
        """Read a text file.

        Returns:
            the text of the file

        Raises:
            ToolError: the path is no text file within the folder.
        """
        *folders, name = _parts(path) or [""]
        if not name:
            raise ToolError(f"{path!r} names no file; give a path such as notes/today.txt")
        with self._opened(folders, path) as folder:
            return self._text(folder, name, path)

    def list_files(self, folder: str = "") -> str:
        """List the files of a folder and of the folders in it.

        Returns:
            paths, one a line

        Raises:
            ToolError: there is no such folder within the fence.
        """
        parts, lines, length = _parts(folder), [], 0
        with self._opened(parts, folder) as top:
            for path in _walk(top, "/".join(parts)):
                length += len(path) + 1
                if length > self.max_chars + 1:
                    lines.append("[cut: there are more]")
                    break
                lines.append(path)
        return "\n".join(lines) or "no files"

    @contextmanager
    def _opened(self, parts: list[str], path: str) -> Iterator[int]:
        """Open a folder within the fence."""
        number = os.open(self.folder, _FOLDER)
        try:
            for part in parts:
                try:
                    inner = os.open(part, _FOLDER, dir_fd=number)
                except OSError as error:
                    raise ToolError(f"{path!r}: {part!r} is no folder here ({error.strerror})") from None
                os.close(number)
                number = inner
            yield number
        finally:
            os.close(number)

    def _text(self, folder: int, name: str, path: str) -> str:
        try:
            # Looked at first: opening a device may do something. Looked at again below: it may be another by then.
            kind = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            if not stat.S_ISREG(kind):
                raise ToolError(f"{path!r} is {_word(kind)}, not a file")
            number = os.open(name, _FILE, dir_fd=folder)
        except OSError as error:
            raise ToolError(f"cannot read {path!r}: {error.strerror}") from None
        with os.fdopen(number, "rb") as file:
            found = os.fstat(number)
            if not stat.S_ISREG(found.st_mode):
                raise ToolError(f"{path!r} is {_word(found.st_mode)}, not a file")
            data = file.read(4 * self.max_chars + 4)
            whole = not file.read(1)
        try:
            text = codecs.getincrementaldecoder("utf-8")().decode(data, final=whole)
        except UnicodeDecodeError:
            raise ToolError(f"{path!r} is not text: it is binary, or in another encoding than UTF-8") from None
        if "\x00" in text:
            raise ToolError(f"{path!r} is not text: it is binary")
        if whole and len(text) <= self.max_chars:
            return text
        shown = text[: self.max_chars]
        return f"{shown}\n[cut: only the first {len(shown)} characters of {found.st_size} bytes are shown]"


def _parts(path: str) -> list[str]:
    """The parts of a path that can only lead inwards."""
    text = path.strip()
    if text.startswith("/"):
        raise ToolError(f"{path!r} is absolute; give a path within the folder, such as notes/today.txt")
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if ".." in parts or "\x00" in text:
        raise ToolError(f"{path!r} leads out of the folder; give a path within it, such as notes/today.txt")
    return parts


def _walk(top: int, prefix: str) -> Iterator[str]:
    """Yield the files under an open folder, those of each folder before those of the folders in it, by name."""
    for root, folders, files, number in os.fwalk(".", dir_fd=top, follow_symlinks=False):
        folders.sort()
        place = "/".join(part for part in (prefix, root[2:]) if part)
        for name in sorted(files):
            try:
                regular = stat.S_ISREG(os.stat(name, dir_fd=number, follow_symlinks=False).st_mode)
            except OSError:
                continue  # gone meanwhile
            if regular:
                path = f"{place}/{name}" if place else name
                yield os.fsencode(path).decode(errors="replace")


def _word(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
