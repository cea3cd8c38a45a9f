"""Connecting: whose server it is, and who waits for it."""

from __future__ import annotations

import os
import signal
import stat
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from processes import PATIENT, Raw, Stage, stage
from test_endpoint import refused

from vcache_backend.errors import ServerUnavailable
from vcache_backend.protocol.client import Client

NOBODY = 65534


OURS = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")


def refusal(path: Path) -> str:
    """Why a client does not use the server there."""
    with Client(path, PATIENT, reconnect=False) as client, pytest.raises(ServerUnavailable) as why:
        client.require()
    return str(why.value)


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
    both_say(
        f"others can write to {folder} (mode 1777); set server.socket to a path in a folder of "
    )
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    both_say(f"{folder} is not a folder but a link")
    assert not list((tmp_path / "elsewhere").iterdir())


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
def test_a_client_sends_nothing_to_another_user_s_server(alone: Stage) -> None:
    rogue = alone.script(ROGUE)
    rogue.expect("listening")
    why = refusal(alone.path)
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


STATUS_AS_NOBODY = """
import contextlib, os, sys
from vcache_backend import cli
with contextlib.suppress(SystemExit):  # imports all while it may
    cli.app(["status", "--socket", "/nowhere/v.sock"])
sys.argv[1:] = ["status", "--socket", sys.argv[1]]
os.setgroups([]); os.setgid(65534); os.setuid(65534)
cli.main()
"""


@OURS
def test_a_user_who_is_not_let_in_is_told_by_the_command_who_can_change_that() -> None:
    with TemporaryDirectory() as open_to_all, stage(Path(open_to_all) / "folder") as here:
        Path(open_to_all).chmod(0o711)
        here.server()
        here.path.parent.chmod(0o711)
        here.script(STATUS_AS_NOBODY).expect("its user lets others in by server.allow_uids")


def test_a_client_waits_its_turn_where_others_fill_the_queue(alone: Stage) -> None:
    server = alone.server()
    with ThreadPoolExecutor() as pool:
        with server.stopped(), ExitStack() as others:
            with suppress(BlockingIOError):
                while True:
                    others.enter_context(Raw(alone.path, hello=False))
            made = pool.submit(alone.client, reconnect=False)
            wait([made], 0.2)
        assert made.result().connected
