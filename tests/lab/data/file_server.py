"""A local HTTP server for download tests: ranges, ETags, and connections that break on purpose."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class FileServer:
    """What is served, how badly, and what was asked for."""

    files: dict[str, bytes]
    etag: str = '"one"'
    ranges: bool = True
    break_after: list[int] = field(default_factory=list)
    """Bytes after which the next answers break off, one entry an answer."""
    delay_s: float = 0.0
    """Pause after each kilobyte."""
    status: int | None = None
    address: str = ""
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and Range header of each request."""


@contextmanager
def serving(server: FileServer) -> Iterator[FileServer]:
    """Run the server on a free port of this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(server)) as http:
        http.daemon_threads = True
        server.address = f"http://127.0.0.1:{http.server_address[1]}/"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


def _handler(server: FileServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            server.requests.append((self.path, asked))
            content = server.files.get(self.path.strip("/"))
            if server.status is not None or content is None:
                self.send_response(server.status or 404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            start = 0
            if asked and server.ranges and self.headers.get("If-Range") == server.etag:
                start = int(asked.removeprefix("bytes=").removesuffix("-"))
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            else:
                self.send_response(200)
            self.send_header("ETag", server.etag)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            body = content[start:]
            if server.break_after:
                body = body[: server.break_after.pop(0)]
                self.close_connection = True
            try:
                for position in range(0, len(body), 1024):
                    self.wfile.write(body[position : position + 1024])
                    self.wfile.flush()
                    time.sleep(server.delay_s)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

    return Handler
