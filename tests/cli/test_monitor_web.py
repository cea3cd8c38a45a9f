"""The monitor's HTTP server: what a real browser sees, and what becomes of the process when the
server hangs or ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
from contextlib import closing
from http.client import HTTPException
from pathlib import Path

import pytest
from processes import SECONDS, Stage, children_of, eventually, ran
from prometheus_client import Gauge
from test_monitor import HASTY, A, address_of, beside, get, needs, samples, used

from vcache_backend import monitor
from vcache_backend.config import ServerConfig, split_address
from vcache_backend.metadata_server import main


def answers(address: str) -> bool:
    try:
        return get(address, "/healthz")[0] == 200
    except (OSError, HTTPException):  # HTTPException: it ended within its answer
        return False


def shown(page: str, folder: Path) -> str:
    """What a real Chromium makes of a page, after five seconds of the page's own time. Skips the
    test if this Chromium does not run here.
    """
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    options += ["--no-first-run", "--disable-background-networking", f"--user-data-dir={folder}"]
    done = ran("chromium", *options, "--virtual-time-budget=5000", "--dump-dom", page)
    return done.stdout or pytest.skip("needs a Chromium that runs here, and this one does not")


@needs("chromium")
def test_a_browser_shows_the_page_without_markup_of_clients(alone: Stage, tmp_path: Path) -> None:
    alone.server()
    address = beside(alone)
    eventually(lambda: get(address, "/readyz")[0] == 200)
    empty = shown(f"http://{address}/", tmp_path / "chromium")
    for said in (
        '<p id="verdict" class="">no instance is connected</p>',
        ">there are no two instances</span>",
        "since the server's start no hit<",
    ):
        assert said in empty
    assert "hour" not in empty
    used(alone)
    lend = "-m", "vcache_backend", "segment", "add", "--device", "host", "--bytes", "1MiB"
    assert ran(sys.executable, *lend, "--socket", alone.path).returncode == 0
    eventually(lambda: json.loads(get(address, "/stats.json")[1])["stats"]["segments"])
    page = shown(f"http://{address}/", tmp_path / "chromium")
    for said in (
        f"<title>vcache: {socket.gethostname()}, {alone.path}</title>",
        "<td>1,536</td><td>768</td><td>50.0 %</td>",
        '<b>512</b><span class="dim">tokens not computed in the last minute',
        '<b>512</b><span class="dim">since the start',
        '<span class="dim">requests/s with a hit',
        ">2,048</text>",
        f">{A.hex()[:8]}</text>",
        "&lt;img src=x onerror=alert(1)&gt; &amp; 'more'",
    ):
        assert said in page
    assert "<img" not in page
    assert not re.search("<td[^>]*></td>", page), "a column that nothing fills"
    assert ">asking…<" not in page


def test_a_hung_server_is_not_well_and_one_that_is_gone_takes_its_monitor_too(alone: Stage) -> None:
    """A service manager's SIGHUP, which all of a service get, ends neither."""
    server = alone.server(metrics=":0")
    own, address = address_of(server), beside(alone, HASTY)
    for pid in (server.pid, *children_of(server.pid)):
        os.kill(pid, signal.SIGHUP)
    eventually(lambda: get(address, "/readyz")[0] == 200)
    server.stop()
    eventually(lambda: get(address, "/healthz")[0] == 503, every=0.1)
    assert "did not answer" in get(address, "/healthz")[1]
    assert samples(address) == {("vcache_server_up",): 0}
    server.cont()
    pages = "/healthz", "/readyz"
    eventually(lambda: [get(address, page)[0] for page in pages] == [200, 200], every=0.1)
    eventually(lambda: answers(own))
    server.kill()
    eventually(lambda: get(address, "/readyz")[0] == 503, every=0.1)
    eventually(lambda: not answers(own))


def test_a_monitor_that_ends_is_started_again_ever_less_often(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose port is taken ends by itself."""
    monkeypatch.setattr(main.MonitorProcess, "FIRST", 0.01)
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        address = "{}:{}".format(*taken.getsockname())
        with closing(main.MonitorProcess(ServerConfig(metrics=address))) as process:

            def starts() -> list[str]:
                process.tick()
                return [line.rpartition(" after ")[2] for line in caplog.messages]

            eventually(lambda: starts() == ["0.02 s", "0.04 s"])


SLOW = {"sends nothing": b"", "reads no answer": b"GET /metrics HTTP/1.0\r\n\r\n"}


def answering() -> list[threading.Thread]:
    threads = threading.enumerate()
    return [thread for thread in threads if "process_request_thread" in thread.name]


@pytest.mark.parametrize("sent", SLOW.values(), ids=SLOW)
def test_slow_connections_end(
    sent: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The metrics are too large for any socket."""
    monkeypatch.setattr(monitor._Handler, "timeout", 0.5)
    begun, setup = threading.Event(), monitor._Handler.setup
    monkeypatch.setattr(monitor._Handler, "setup", lambda handler: begun.set() or setup(handler))
    with (
        closing(monitor.Samples(tmp_path / "vcache.sock")) as asked,
        monitor.Web(":0", asked) as served,
        socket.create_connection(split_address(served.address, "")) as slow,
    ):
        Gauge("large", "x" * (16 << 20), registry=served.registry)
        serving = threading.Thread(target=served.serve_forever)
        serving.start()
        try:
            slow.sendall(sent)
            # It may be over before this thread has its next turn.
            assert begun.wait(SECONDS)
            eventually(lambda: not answering())
        finally:
            served.shutdown()
            serving.join()
    assert not [one for one in caplog.records if one.name == monitor.log.name]
