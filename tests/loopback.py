"""A JSON server on a port of the loopback interface, for tests of what speaks HTTP."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """One that does not turn away whole batches of rollouts that connect at the same time."""

    request_queue_size = 256
    daemon_threads = True


Answer = Callable[[str, dict[str, Any] | None], tuple[int, Any]]
"""(path, body of a POST or None) -> (status, value to send as JSON)."""


@contextmanager
def serving(answer: Answer, port: int = 0) -> Iterator[str]:
    """Serve until the block ends, on a free port if none is named; gives the URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(*answer(self.path, None))

        def do_POST(self) -> None:
            self._send(*answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def _send(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = Server(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
