"""Serving the dashboard on this machine: the port, the address that is printed, the browser."""

from __future__ import annotations

import errno
import socket
import webbrowser
from collections.abc import Callable
from pathlib import Path
from threading import Timer

from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from stepscope.analysis.errors import StepscopeError

HOST = "127.0.0.1"
DEFAULT_PORT = 8050
TRIED_PORTS = 20


class QuietHandler(WSGIRequestHandler):
    """Keeps connections open (the timeline asks often) and does not print a line a request."""

    protocol_version = "HTTP/1.1"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Nothing: the terminal belongs to the person."""


def free_port(wanted: int | None) -> tuple[int, str]:
    """(port, remark). Without a wish the first free one from DEFAULT_PORT on; a port that was asked for must be free.

    Raises StepscopeError where it is not.
    """
    candidates = [wanted] if wanted is not None else list(range(DEFAULT_PORT, DEFAULT_PORT + TRIED_PORTS))
    for port in candidates:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                if error.errno == errno.EACCES:
                    raise StepscopeError(
                        f"port {port} needs more rights than you have: choose one above 1023 with --port"
                    ) from error
                continue
            found = int(probe.getsockname()[1])
        busy = (
            f"port {DEFAULT_PORT} is busy, so this is port {found}" if wanted is None and found != DEFAULT_PORT else ""
        )
        return found, busy
    if wanted is not None:
        raise StepscopeError(
            f"port {wanted} is busy: another program listens there. Choose another with --port, or leave --port out"
        )
    raise StepscopeError(f"ports {candidates[0]} to {candidates[-1]} are all busy: choose one with --port")


def make(root: Path, port: int) -> BaseWSGIServer:
    """A server over the runs under `root`, bound to this machine alone; `serve_forever` starts it."""
    from stepscope.dashboard.app import create_app

    app = create_app(root)
    return make_server(HOST, port, app.server, threaded=True, request_handler=QuietHandler)


def serve(root: Path, port: int | None, open_browser: bool, say: Callable[[str], None]) -> None:
    """Serve until interrupted. Raises StepscopeError for a root that is no directory and for a busy port."""
    if not root.is_dir():
        raise StepscopeError(f"{root} is no directory: give the directory that holds your runs (or one run directory)")
    found, remark = free_port(port)
    server = make(root, found)
    if remark:
        say(remark)
    address = f"http://{HOST}:{found}/"
    say(f"stepscope dashboard of {root} at {address}  (Ctrl+C ends it)")
    if open_browser:
        Timer(0.3, webbrowser.open, [address]).start()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        say("ended")
    finally:
        server.server_close()
