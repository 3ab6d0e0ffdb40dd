"""Only this machine, only its own pages, nothing from elsewhere; a clear word when a port is busy."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from stepscope.analysis.errors import StepscopeError
from stepscope.dashboard import server
from stepscope.dashboard.app import create_app
from stepscope.dashboard.catalogue import Catalogue


@pytest.fixture(scope="module")
def client(catalogue: Catalogue) -> FlaskClient:
    return create_app(catalogue).server.test_client()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8050", "localhost:1", "LOCALHOST", "[::1]:8050"])
def test_this_machine_is_answered(client: FlaskClient, host: str):
    assert client.get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil:8050", "192.168.0.3", "127.0.0.1@evil"]
)
def test_other_hosts_are_refused(client: FlaskClient, host: str):
    for path in ("/", "/api/theme", "/api/meta/slow", "/_dash-layout", "/assets/app.css"):
        assert client.get(path, headers={"Host": host}).status_code == 403


def test_pages_of_other_sites_are_refused(client: FlaskClient):
    local = {"Host": "localhost"}
    assert client.get("/api/meta/slow", headers={**local, "Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert client.get("/api/meta/slow", headers={**local, "Sec-Fetch-Site": "same-origin"}).status_code == 200


def test_requests_of_other_origins_are_refused(client: FlaskClient):
    at = {"Host": "localhost:8050"}
    for origin in ("http://evil.example", "http://localhost:9999", "null", "http://localhost:8050.evil.example", ""):
        for path in ("/", "/api/meta/slow", "/_dash-layout"):
            assert client.get(path, headers={**at, "Origin": origin}).status_code == 403, (origin, path)
    assert client.post("/_dash-update-component", headers={**at, "Origin": "http://evil"}).status_code == 403
    assert client.get("/api/meta/slow", headers={**at, "Origin": "http://LOCALHOST:8050"}).status_code == 200


def test_every_answer_carries_the_policy_and_every_script_is_local(client: FlaskClient):
    page = client.get("/", headers={"Host": "localhost"})
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy
    assert (
        "script-src 'self' 'sha256-" in policy and "'unsafe-inline'" not in policy.split("script-src")[1].split(";")[0]
    )
    assert page.headers["X-Content-Type-Options"] == "nosniff"
    addresses = re.findall(r'(?:src|href)="([^"]+)"', page.get_data(as_text=True))
    assert len(addresses) > 8
    assert [a for a in addresses if not a.startswith("/")] == []


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/meta/nothing", 404),
        ("/api/meta/../secret", 404),
        ("/api/meta/broken", 409),
        ("/api/view/slow?first=0&bins=10&bin_ns=7&lanes=0", 400),
        ("/api/view/slow?first=0&bins=99999&bin_ns=8&lanes=0", 400),
        ("/api/view/slow?first=x&bins=9&bin_ns=8&lanes=0", 400),
        ("/api/view/slow?first=0&bins=9&bin_ns=8&lanes=0-99999", 400),
        ("/api/view/slow?first=0&bins=9&bin_ns=8&lanes=a-b", 400),
        ("/api/event/slow?track=0&index=123456", 404),
        ("/api/event/slow?track=-1&index=0", 404),
        ("/api/sums/slow?start=5&end=5", 400),
        ("/api", 404),
        ("/api/", 404),
        ("/api/nope", 404),
        ("/api/nope/slow", 404),
        ("/api/sums/slow?start=0&end=1" + 30 * "0", 400),
        ("/api/sums/slow?start=-1" + 30 * "0" + "&end=1", 400),
        ("/api/sums/slow?start=0&end=1" + 9999 * "0", 400),
        ("/api/sums/slow?start=0&end=9&ranks=1" + 30 * "0", 200),  # a rank that is not there
        ("/api/view/slow?first=1" + 18 * "0" + "&bins=8&bin_ns=1048576&lanes=0", 400),
        ("/api/view/slow?first=0&bins=8&bin_ns=4611686018427387904&lanes=0", 400),
        ("/api/view/slow?first=0&bins=8&bin_ns=8&lanes=1" + 30 * "0", 200),
        ("/api/locate/slow?rank=1" + 30 * "0" + "&op_id=1&start=1", 400),
        ("/api/search/slow?q=a&bins=9&after=1" + 30 * "0", 400),
        ("/api/same/slow?track=0&index=999999&direction=1", 404),
    ],
)
def test_senseless_requests_get_a_status_not_a_traceback(client: FlaskClient, path: str, status: int):
    assert client.get(path, headers={"Host": "localhost"}).status_code == status


def test_a_view_of_many_lanes_is_one_binary_answer(client: FlaskClient):
    answer = client.get("/api/view/slow?first=0&bins=256&bin_ns=1048576&lanes=0-9,20", headers={"Host": "localhost"})
    assert answer.mimetype == "application/octet-stream"
    length = int.from_bytes(answer.data[:4], "little")
    header = json.loads(answer.data[4 : 4 + length])
    assert [row[0] for row in header["tracks"]] == [*range(10), 20]


def test_a_port_that_was_asked_for_must_be_free():
    with socket.socket() as taken:
        taken.bind((server.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StepscopeError, match=f"port {port} is busy.*--port"):
            server.free_port(port)


def test_without_a_wish_the_next_free_port_is_taken_and_said(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as taken:
        taken.bind((server.HOST, 0))
        taken.listen()
        monkeypatch.setattr(server, "DEFAULT_PORT", taken.getsockname()[1])
        port, remark = server.free_port(None)
        assert port != taken.getsockname()[1]
        assert f"is busy, so this is port {port}" in remark


def test_a_root_that_is_no_directory(tmp_path: Path):
    with pytest.raises(StepscopeError, match="no directory"):
        server.serve(tmp_path / "nothing", None, False, print)


def test_it_listens_on_this_machine_alone(tmp_path: Path):
    made = server.make(tmp_path, 0)
    try:
        assert made.server_address[0] == "127.0.0.1"
    finally:
        made.server_close()
