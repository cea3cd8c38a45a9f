"""Whose the socket is: one server at one path, files of its own beside it, nobody's files but its
own touched.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from processes import Child

from vcache_backend.config import from_dict
from vcache_backend.errors import ConfigError
from vcache_backend.metadata_server.endpoint import Endpoint, beside
from vcache_backend.metadata_server.start import ensure


def refused(path: Path) -> str:
    """What a server says that does not start there."""
    with Child([sys.executable, "-m", "vcache_backend", "serve", "--socket", str(path)]) as server:
        status, said = server.wait()
    assert status == 1
    assert "Traceback" not in said
    return said


# ---- two servers


def test_files_are_kept_from_tmp_cleaners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "vcache.sock"
    with closing(Endpoint(path)) as endpoint:
        for now, touched in ((1e9, True), (1e9 + 60, False), (1e9 + 3601, True)):
            monkeypatch.setattr(time, "monotonic", lambda now=now: now)
            files = [path, beside(path, ".lock")]
            for file in files:
                os.utime(file, (0, 0))
            endpoint.keep_fresh()
            assert [file.stat().st_mtime > 0 for file in files] == [touched] * 2


# ---- names


@pytest.mark.parametrize("where", ["/dev/null/vcache.sock", "/tmp/" + "x" * 120 + ".sock"])
def test_a_socket_path_that_cannot_be_used_is_said(where: str) -> None:
    assert re.search(r"(server\.|--)socket: ", refused(Path(where)))


def test_without_the_right_to_write_there_it_says_what_to_set() -> None:
    """Nobody may make a folder in /sys, root neither."""
    path, advice = Path("/sys/vcache/vcache.sock"), "set server.socket to a path in a folder of "
    assert advice in refused(path)
    with pytest.raises(ConfigError, match=advice):
        ensure(from_dict({"server": {"socket": str(path)}}))


def test_what_is_there_and_not_ours_stays_and_is_said(tmp_path: Path) -> None:
    """A file or a link in the socket's place, a link in the lock's."""
    file, link = tmp_path / "notes.txt", tmp_path / "link"
    file.write_text("mine")
    for made in (link, beside(tmp_path / "other", ".lock")):
        made.symlink_to(file)
    for taken in (file, link):
        assert "exists and is not a socket" in refused(taken)
    assert "server.socket: cannot use" in refused(tmp_path / "other")
    assert (file.read_text(), link.is_symlink()) == ("mine", True)


def test_a_socket_on_which_another_program_listens_stays(tmp_path: Path) -> None:
    """Such as the user's D-Bus in `XDG_RUNTIME_DIR`. One on which nobody listens makes way."""
    path = tmp_path / "bus"
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as asking:
        other.bind(str(path))
        other.listen()
        assert f"another program, no metadata server, listens at {path}" in refused(path)
        asking.connect(str(path))
    with closing(Endpoint(path)) as endpoint:
        assert not endpoint.lost()


# ---- folders


# ---- who serves, who may come in
