"""Keeps a server for as long as its owner lives: run as a script, `python keeper.py LOG COMMAND...`.

The owner holds the other end of this process's standard input. When that closes, because the owner closed it or died in
whatever way, the server's whole process group is ended. Standard library only: nothing here may be slow or fail.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from typing import NoReturn

GRACE_S = 10.0


def end_group(group: int, grace_s: float = GRACE_S) -> None:
    """End a process group, first gently; returns once no process of it is left."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        alive = _signal(group, sent)
        until = time.monotonic() + grace_s
        while alive and time.monotonic() < until:
            time.sleep(0.05)
            alive = _signal(group, 0)
        if not alive:
            return


def _signal(group: int, number: int) -> bool:
    """Send a signal to a process group (0 only asks); whether there is any process of it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def main() -> NoReturn:
    """Start the server, wait for its end or for the owner's, and leave with the server's exit code."""
    log, *command = sys.argv[1:]
    with open(log, "ab", buffering=0) as output:  # noqa: PTH123 - before anything is imported
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    print(server.pid, flush=True)

    def follow_owner() -> None:
        sys.stdin.buffer.read()
        end_group(server.pid)

    threading.Thread(target=follow_owner, daemon=True).start()
    code = server.wait()
    end_group(server.pid)  # workers that outlived it
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # the owner decides, by closing the pipe
    main()
