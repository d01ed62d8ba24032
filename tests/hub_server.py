"""A Hugging Face Hub of one repository on loopback: as much of its API as downloads need, and its ways to fail."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from processes import PATIENCE_S

COMMIT = "c0ffee" + "0" * 34
WEIGHTS = (".safetensors", ".gguf")


class Hub:
    """What the server has and what it was asked; the fields may be changed while it runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repository = "org/tiny"
        self.requests: list[str] = []
        self.fail: dict[str, tuple[int, dict[str, str]]] = {}
        """Status and headers to answer with, by a pattern that is looked for in `METHOD path`."""
        self.cut_after: int | None = None
        """Drop the connection after so many bytes of each body with weights."""
        self.down_after_cut = False
        """Have no more of them to give then."""
        self.stall: tuple[str, int] | None = None
        """Of a file send so many bytes, then nothing more until `go_on` is set."""
        self.stalled, self.go_on = threading.Event(), threading.Event()
        self.damage = False
        """Send other weights than announced."""
        self.weights_sent: list[int] = []
        """Bytes of each answer with weights."""
        self.sizes: dict[str, int] = {}
        """What to claim of a file's size."""
        self.answer: dict[str, Any] | str = {}
        """Changes to what is said of the repository, or the text to say instead."""
        self.url = ""

    def files(self) -> dict[str, bytes]:
        """By name relative to the repository."""
        return {str(p.relative_to(self.folder)): p.read_bytes() for p in self.folder.rglob("*") if p.is_file()}

    def fetched(self) -> set[str]:
        """The files whose content was asked for."""
        found = (re.fullmatch(r"GET /org/tiny/resolve/[^/]+/(.+)", request) for request in self.requests)
        return {match[1] for match in found if match}


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    """Serve the files of `folder` as the repository `org/tiny`."""
    hub = Hub(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._handle(body=False)

        def do_GET(self) -> None:
            self._handle(body=True)

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _handle(self, *, body: bool) -> None:
            path = unquote(urlparse(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            for pattern, (status, headers) in hub.fail.items():
                if re.search(pattern, hub.requests[-1]):
                    self._answer(status, b"", headers, body)
                    return
            api = f"/api/models/{hub.repository}"
            if path == api or re.fullmatch(rf"{api}/revision/(main|{COMMIT})", path):
                self._about()
            elif re.fullmatch(rf"{api}/revision/.+", path):
                self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"}, body)
            elif path == f"{api}/tree/{COMMIT}":
                self._json([{"type": "file", "path": s["rfilename"], **s, "oid": "0"} for s in self._siblings()])
            elif match := re.fullmatch(rf"/{hub.repository}/resolve/(?:main|{COMMIT})/(.+)", path):
                self._file(match[1], body)
            else:
                self._answer(401, b"", {"X-Error-Code": "RepoNotFound"}, body)

        def _about(self) -> None:
            if isinstance(hub.answer, str):
                self._answer(200, hub.answer.encode(), {"Content-Type": "application/json"}, True)
                return
            about = {"id": hub.repository, "sha": COMMIT, "siblings": self._siblings(), **self._count()}
            self._json({**about, **hub.answer})

        def _siblings(self) -> list[dict[str, Any]]:
            return [{"rfilename": n, "size": hub.sizes.get(n, len(data))} for n, data in hub.files().items()]

        def _count(self) -> dict[str, Any]:
            total = hub.sizes.get("parameters")
            return {"safetensors": {"parameters": {"BF16": total}, "total": total}} if total else {}

        def _json(self, document: Any) -> None:
            self._answer(200, json.dumps(document).encode(), {"Content-Type": "application/json"}, True)

        def _file(self, name: str, body: bool) -> None:
            data = hub.files().get(name)
            if data is None:
                self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, body)
                return
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            headers["Accept-Ranges"] = "bytes"
            begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            status, start = (206, int(begin[1])) if begin else (200, 0)
            if begin:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            limit = hub.cut_after if name.endswith(WEIGHTS) and body else None
            if hub.damage and name.endswith(WEIGHTS):
                data = bytes(len(data))
            self._answer(status, data[start:], headers, body, limit)

        def _answer(
            self, status: int, data: bytes, headers: dict[str, str], body: bool, limit: int | None = None
        ) -> None:
            if limit is not None and hub.down_after_cut:
                hub.fail[r"GET .*(safetensors|gguf)$"] = (503, {})
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            is_weights = self.path.endswith(WEIGHTS) and "resolve" in self.path
            if body and hub.stall is not None and self.path.endswith(hub.stall[0]):
                self.wfile.write(data[: hub.stall[1]])
                hub.stalled.set()
                hub.go_on.wait(PATIENCE_S)
                self.close_connection = True
                return
            if body:
                self.wfile.write(data[:limit])
                if is_weights:
                    hub.weights_sent.append(len(data[:limit]))
            if limit is not None and limit < len(data):
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        server.shutdown()
        thread.join(PATIENCE_S)
        server.server_close()
