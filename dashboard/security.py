"""What keeps the dashboard to this machine, to its root directory and to text: Host, content policy, run ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from flask import Flask, Response, abort, request

LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})

POLICY = (
    "default-src 'none'",
    "script-src 'self' {hashes}",
    "style-src 'self' 'unsafe-inline'",  # Mantine, ag-grid and Plotly write style elements
    "img-src 'self' data: blob:",
    "font-src 'self' data:",
    "connect-src 'self'",
    "worker-src 'self' blob:",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
)
"""Nothing is fetched from anywhere else, nothing written into the page runs, nobody frames it."""


def host_name(header: str) -> str:
    """The host of a `Host` header without its port, lower case; empty for one that is not a host."""
    try:
        return (urlsplit(f"//{header}").hostname or "").lower()
    except ValueError:
        return ""


def same_origin(origin: str, host: str) -> bool:
    """Whether an `Origin` header names the server that the `Host` header names; `null` does not."""
    return origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def protect(server: Flask, script_hashes: Sequence[str]) -> None:
    """Refuse every request that names another host (DNS rebinding) or comes from another site's page, and set the
    headers that keep the browser to this server."""
    policy = "; ".join(POLICY).format(hashes=" ".join(script_hashes))

    @server.before_request
    def check_host() -> None:
        if host_name(request.headers.get("Host", "")) not in LOCAL_NAMES:
            abort(403, "stepscope answers only to localhost")
        origin = request.headers.get("Origin")
        if origin is not None and not same_origin(origin, request.headers["Host"]):
            abort(403, "stepscope answers only to its own pages")
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            abort(403, "stepscope answers only to its own pages")

    @server.after_request
    def headers(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = policy
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        return response


def inside(root: Path, relative: str) -> Path | None:
    """The directory `relative` below `root`, or None for anything that leads elsewhere (`..`, absolute, a link out)."""
    if not relative or "\0" in relative or len(relative) > 1024:
        return None
    base = root.resolve()
    try:
        path = (base / relative).resolve()
    except (OSError, RuntimeError):
        return None
    return path if path.is_relative_to(base) and path.is_dir() else None
