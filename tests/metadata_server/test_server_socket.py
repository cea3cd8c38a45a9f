"""Whose the socket is: one server at one path, files of its own beside it, nobody's files but its
own touched.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import stat
import sys
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from processes import PATIENT, Child, Stage, ran, stage

from vcache_backend.errors import ServerUnavailable
from vcache_backend.metadata_server.endpoint import Endpoint, beside
from vcache_backend.protocol.client import Client

NOBODY = 65534
OURS = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")


def refused(path: Path) -> str:
    """What a server says that does not start there."""
    with Child([sys.executable, "-m", "vcache_backend", "serve", "--socket", str(path)]) as server:
        status, said = server.wait()
    assert status == 1
    assert "Traceback" not in said
    return said


def refusal(path: Path) -> str:
    """Why a client does not use the server there."""
    with Client(path, PATIENT, reconnect=False) as client, pytest.raises(ServerUnavailable) as why:
        client.require()
    return str(why.value)


# ---- two servers


def test_a_server_whose_path_leads_to_another_one_answers_nothing_more(stage_: Stage) -> None:
    """Stopped while lock and socket were taken from under it, with a question waiting for when it
    goes on."""
    first = stage_.server()
    asker = stage_.raw()
    with first.stopped():
        asker.send("list_segments")
        beside(stage_.path, ".lock").unlink()
        stage_.path.unlink()
        second = stage_.server()
    assert asker.receive() is None
    status, said = first.wait()
    assert status == 1
    assert f"{stage_.path} does not lead to this server any more (another socket is there)" in said
    assert "Traceback" not in said
    assert second.alive
    assert stage_.raw().ask("list_segments") == ["segments", []]


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


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (
            "-f 1",
            "server.socket: cannot use {}: [Errno 27] File too large",
        ),
        (
            "-s 4000000 -v 4000000",
            "can't start new thread: raise ulimit -u, or pids.max of the cgroup",
        ),
    ],
    ids=["disk", "threads"],
)
def test_what_a_server_lacks_is_told_in_one_line(limits: str, said: str, tmp_path: Path) -> None:
    """Room for resets, as on a full disk: here files have 1 KiB at most.
    Threads: here a stack is as large as the address space."""
    # -B: Python 3.11 would leave compiled modules of 1 KiB, which nobody can import.
    command = shlex.join([sys.executable, "-B", "-m", "vcache_backend", "serve"])
    path = tmp_path / "run" / "v.sock"
    done = ran("bash", "-c", f"ulimit {limits}; {command} --socket {path}")
    assert (done.returncode, done.stderr) == (1, f"vcache: {said.format(path)}\n")


# ---- folders


@OURS
def test_a_folder_that_others_can_write_is_refused_by_server_and_client(tmp_path: Path) -> None:
    folder = tmp_path / "vcache-0"
    path = folder / "vcache.sock"

    def both_say(why: str) -> None:
        assert why in refused(path)
        assert why in refusal(path)

    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    both_say(f"{folder} belongs to uid {NOBODY}, not to uid ")
    os.chown(folder, 0, 0)
    folder.chmod(0o777)
    both_say(f"`chmod go-w {folder}`")
    folder.chmod(0o1777)
    both_say(f"others can write to {folder} (mode 1777); set server.socket to a folder of your own")
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    both_say(f"{folder} is not a folder but a link")
    assert not list((tmp_path / "elsewhere").iterdir())


# ---- who serves, who may come in

AS_NOBODY = """
import os, sys
from pathlib import Path
from vcache_backend.config import ClientConfig
from vcache_backend.protocol.client import Client
os.setgroups(eval(sys.argv[3])); os.setgid(65534); os.setuid(65534)
client = Client(Path(sys.argv[1]), ClientConfig(connect_seconds=10, request_seconds=10, **eval(sys.argv[2])), reconnect=False)
try:
    client.require()
    print("segments", client.list_segments())
except Exception as error:
    print("refused:", error)
"""
ROGUE = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
os.setgid(65534); os.setuid(65534)
listener.listen()
print("listening", flush=True)
peer, _ = listener.accept()
peer.settimeout(10)
print("got", len(peer.recv(1 << 16)), "bytes", flush=True)
"""


@OURS
def test_a_client_sends_nothing_to_another_user_s_server(stage_: Stage) -> None:
    rogue = stage_.script(ROGUE)
    rogue.expect("listening")
    why = refusal(stage_.path)
    assert f"uid {NOBODY}" in why
    assert "client.server_uid" in why
    assert "vcache serve" not in why
    rogue.expect("got 0 bytes")


@OURS
def test_other_users_are_let_in_where_the_server_allows_them_and_they_name_its_user() -> None:
    """In a folder of its own: pytest closes its folders to other users whenever it starts."""
    with TemporaryDirectory() as open_to_all, stage(Path(open_to_all) / "folder") as here:
        Path(open_to_all).chmod(0o711)
        allowing = here.server(allow_uids=[NOBODY])
        assert stat.S_IMODE(here.path.parent.stat().st_mode) == 0o711
        assert stat.S_IMODE(here.path.stat().st_mode) == 0o666
        here.script(AS_NOBODY, "dict(server_uid=0)", "[]").expect("segments []")
        allowing.signal(signal.SIGTERM)
        allowing.wait()
        others = here.server(allow_uids=[1234])
        for _ in range(2):
            said = here.script(AS_NOBODY, "{}", "[]").expect("refused:")
            assert f"uid {NOBODY} may not use the server of uid 0" in said
            assert "server.allow_uids" in said
        others.signal(signal.SIGTERM)
        assert others.wait()[1].count(f" of uid {NOBODY}: uid {NOBODY} may not use") == 2
