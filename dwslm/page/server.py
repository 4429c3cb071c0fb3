"""`dwslm page serve`: the page live, for this machine's own browser. It reads; nothing can be changed through it."""

import gzip
import ipaddress
import socket
import sys
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from dwslm.page import index_page
from dwslm.page.amounts import shown
from dwslm.page.site import Site, static_files
from dwslm.page.watch import Overview

TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8",
         "json": "application/json"}  # fmt: skip
FRESH_S = 1.0  # for which a look at all runs stands, so that many open pages cost no more than one
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
SILENT_S = 30.0  # after which a connection without a request is closed


class PageServer(ThreadingHTTPServer):
    """Answers GET and HEAD for the files that `export` would write, made at the moment they are asked for.

    Requests are answered only under a name of this server (the Host header): a page of another site that has its own name point
    here must not read runs.
    """

    daemon_threads = True

    def __init__(
        self,
        site: Site,
        host: str,
        port: int,
        *,
        names: frozenset[str] = LOOPBACK,
        clock: Callable[[], float] = time.time,
    ):
        """names: that may stand in the Host header. port 0 takes a free one. Raises OSError where the port is taken."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.site, self.names, self.clock = site, names | {host}, clock
        self._seen: Overview | None = None
        self._looking = threading.Lock()
        super().__init__((host, port), Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing of a reader who has gone away; the rest is a fault of ours."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        name = host.decode() if isinstance(host, bytes | bytearray) else str(host)
        return f"http://{f'[{name}]' if ':' in name else name}:{port}/"

    def overview(self) -> Overview:
        """All runs, as of a second ago at most. Raises ValueError where the folder is gone."""
        with self._looking:
            now = self.clock()
            if self._seen is None or abs(now - self._seen.now) > FRESH_S:  # a clock may be set back
                self._seen = self.site.overview(now)
            return self._seen


class Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = SILENT_S

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_GET

    def _answer(self) -> None:
        if not self._ours():
            return self._send(421, b"this server is not called by that name\n", "txt")
        try:
            found = self._find(unquote(urlsplit(self.path).path))
        except (OSError, ValueError) as error:  # a run that was moved, decisions that do not hold
            return self._send(500, f"{error}\n".encode(), "txt")
        if found is None:
            return self._send(404, b"no such page\n", "txt")
        self._send(200, *found)

    def _ours(self) -> bool:
        name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        return name is not None and name in self.server.names

    def _find(self, path: str) -> tuple[bytes, str] | None:
        """Content and ending of the file that stands for a path. Names of runs are looked up in the list, never on disk."""
        if path.startswith("/static/"):
            static = static_files().get(path.removeprefix("/static/"))
            return (static, path.rpartition(".")[2]) if static is not None else None
        site = self.server.site
        seen = self.server.overview()
        if path in ("/", "/index.html"):
            return site.index(seen).encode(), "html"
        if path == "/data/runs.json":
            return site.listed(seen), "json"
        for folder, ending in (("/runs/", ".html"), ("/data/", ".json")):
            if path.startswith(folder) and path.endswith(ending):
                run = seen.find(path.removeprefix(folder).removesuffix(ending))
                if run is None:
                    return None
                article, content = site.run(run, seen)
                if ending == ".json":
                    return content.encode(), "json"
                return index_page.run_file(shown(run.name or run.path.name), article, seen.now).encode(
                    errors="replace"
                ), "html"
        return None

    def _send(self, status: int, content: bytes, ending: str) -> None:
        tag = f'"{sha256(content).hexdigest()[:32]}"'
        if status == 200 and tag in self.headers.get("If-None-Match", ""):
            status, content = 304, b""
        packed = len(content) > 1400 and "gzip" in self.headers.get("Accept-Encoding", "")
        if packed:
            content = gzip.compress(content, 1)
        self.send_response(status)
        if status != 304:
            self.send_header("Content-Type", TYPES.get(ending, "text/plain; charset=utf-8"))
            self.send_header("Content-Length", str(len(content)))
        if packed:
            self.send_header("Content-Encoding", "gzip")
        if status in (200, 304):
            self.send_header("ETag", tag)
        for name, value in (
            ("Vary", "Accept-Encoding"),
            ("Cache-Control", "no-cache"),
            ("Content-Security-Policy", f"{index_page.POLICY}; frame-ancestors 'none'"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cross-Origin-Opener-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def version_string(self) -> str:
        return "dwslm"

    def log_message(self, format: str, *args: object) -> None:
        """A poll every five seconds is no news."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address or name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
