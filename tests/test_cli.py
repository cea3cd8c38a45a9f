"""`vcache`, as a person meets it: in this process where that is enough, else the command itself
against a real server.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, SECONDS, Child, Stage
from typer.testing import CliRunner

from vcache_backend import __version__, command, config
from vcache_backend.cli import app
from vcache_backend.command import tokens_of

VCACHE = [sys.executable, "-m", "vcache_backend.cli"]
EXTRAS = ("torch", "numpy", "triton", "cuda", "xxhash")
BASE = (
    f"import sys; sys.modules.update(dict.fromkeys({EXTRAS})); from vcache_backend.cli "
    "import app, main"
)
"""Python as it is where only the base was installed: what the extras bring cannot be imported."""
COMMANDS = [
    [],
    ["serve"],
    ["status"],
    ["clear"],
    ["segment"],
    ["segment", "add"],
    ["segment", "list"],
    ["segment", "drop"],
    ["config"],
    ["config", "check"],
    ["config", "init"],
    ["config", "show"],
    ["doctor"],
    ["plan"],
    ["demo"],
    ["mooncake"],
    ["version"],
]

TALL = 5
"""Lines of a small window."""


def vcache(*arguments: str, expect: int = 0) -> Any:
    """Run a command in this process; its result, once the exit code is as expected."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == expect, (result.stdout, result.stderr, result.exception)
    return result


# ---- without a server


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(command: list[str]) -> None:
    said = vcache(*command, "-h").stdout
    assert ("Usage" in said, said) == (True, vcache(*command, "--help").stdout)
    assert "<bool>" not in said


@pytest.mark.parametrize(
    ("text", "tokens"), [("500k", 500_000), ("1.5M", 1_500_000), ("500,000", 500_000), ("0", 0)]
)
def test_numbers_of_tokens_may_be_written_short(text: str, tokens: int) -> None:
    assert tokens_of(text) == tokens


def test_help_is_quick_because_it_loads_nothing_heavy() -> None:
    code = (
        "import sys, vcache_backend.cli; print([n for n in ('torch', 'numpy', 'rich.table', "
        "'triton') if n in sys.modules])"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    assert child.stdout == "[]\n"


def test_version_names_the_package_and_the_protocol() -> None:
    assert vcache("version").stdout.startswith(f"vcache {__version__}, protocol ")
    assert vcache("--version").stdout == vcache("version").stdout
    assert json.loads(vcache("version", "--json").stdout)["version"] == __version__


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["status", "--nonsense"],
        ["status", "--since", "5"],
        ["status", "--watch", "--every", "inf"],
        ["segment", "add", "--device", "host"],
        ["segment", "add", "--device", "host", "--bytes", "much"],
        ["segment", "add", "--device", "host", "--bytes", "0"],
        ["segment", "add", "--device", "host", "--bytes", "9" * 400 + "GiB"],
        ["plan", "--model", "x", "--tokens", "9" * 400],
        ["plan", "--model", "x", "--tokens", "-5"],
        ["plan", "--model", "x", "--tokens", "1,5M"],
        ["clear", "--namespace", ""],
        ["clear", "--namespace", " "],
        ["clear", "--namespace", "xyz"],
        ["clear", "--namespace", "00ff"],
        ["config", "check"],
        ["config", "init", "--like", "nonsense"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert vcache(*arguments, expect=2).stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["plan", "--model", "x", "--gpu-memory", "80"],
            "80 without a unit is 80 B: write the unit, such as 80GiB or 80B",
        ),
        (
            ["plan", "--model", "x", "--gpu-memory", "81920.5"],
            "81920.5 without a unit is 81920 B: write the unit",
        ),
        (["segment", "add", "--device", "host", "--bytes", "8"], "8 without a unit is 8 B"),
        (["mooncake", "--segment", "9" * 5000], "Expected at most 256 TiB"),
    ],
    ids=["gpu-memory", "a-fraction", "bytes", "digits"],
)
def test_a_size_of_a_command_that_lacks_its_unit_is_wrong_usage_that_says_what_to_write(
    arguments: list[str], said: str
) -> None:
    assert said in " ".join(vcache(*arguments, expect=2).stderr.replace("│", " ").split())


def test_a_shell_completes_commands_and_options() -> None:
    for typed, offered in (
        ("vcache seg", "segment"),
        ("vcache segment dr", "drop"),
        ("vcache status --si", "--since"),
    ):
        words = {
            "COMP_WORDS": typed,
            "COMP_CWORD": str(len(typed.split()) - 1),
            "_VCACHE_COMPLETE": "complete_bash",
        }
        ran = subprocess.run(
            VCACHE, env={**os.environ, **words}, capture_output=True, text=True, timeout=SECONDS
        )
        assert ran.stdout.split() == [offered], ran


@pytest.mark.parametrize(
    "arguments",
    [["status"], ["status", "--json"], ["clear"], ["segment", "list"], ["segment", "drop", "x"]],
    ids=" ".join,
)
def test_without_a_server_there_is_one_line_and_exit_code_1(
    arguments: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "none.sock"
    result = vcache(*arguments, "--socket", str(path), expect=1)
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    assert result.stderr.startswith("vcache: ")
    assert str(path) in result.stderr


def test_of_a_server_that_was_never_there_a_watcher_is_told_once(tmp_path: Path) -> None:
    watch = [*VCACHE, "status", "--watch", "--socket", str(tmp_path / "none.sock")]
    ran = subprocess.run(watch, capture_output=True, text=True, timeout=SECONDS)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1), ran


@pytest.mark.parametrize(
    ("command", "place", "said"),
    [
        ("status", "plain", "is no socket"),
        ("status", "x" * 108, "--socket: socket must be a path of at most 107 bytes"),
        ("serve", "/", "--socket: socket must"),
    ],
    ids=["plain-file", "too-long", "no-name"],
)
def test_a_bad_socket_is_one_line_that_tells_nobody_to_start_a_server(
    command: str, place: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "plain").touch()
    complaint = vcache(command, "--socket", str(tmp_path / place), expect=1).stderr
    assert (said in complaint, complaint.count("\n"), "start one" in complaint) == (True, 1, False)


def test_config_check_accepts_a_good_file_and_names_the_mistake_in_a_bad_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("pool: {segment_bytes: 2 GiB}")
    assert vcache("config", "check", str(path)).stdout == f"{path}: ok\n"
    path.write_text("pool: {segment_byts: 2 GiB}")
    message = vcache("config", "check", str(path), expect=1).stderr
    said = (
        "line 1: Object contains unknown field `segment_byts` - at `$.pool`; did you mean "
        "`segment_bytes`?"
    )
    assert message == f"vcache: {path}: {said}\n"
    for text, wrong in (
        ("pool: {device: gpu0}", "device must be auto, host, "),
        (f"server: {{socket: /{'x' * 108}}}", "107 bytes"),
        ("server: {socket: here/vcache.sock}", "write the whole path"),
        (f"server: {{socket: {ROOT}}}", f"{ROOT} is there and is no socket"),
    ):
        path.write_text("# of mine\n" + text)
        message = vcache("config", "check", str(path), expect=1).stderr
        assert (
            wrong in message,
            message.startswith(f"vcache: {path}: line 2: "),
            message.count("\n"),
        ) == (True, True, 1)


def test_config_init_writes_a_file_that_is_whole_and_overwrites_none(tmp_path: Path) -> None:
    path = tmp_path / "vcache.yaml"
    vcache("config", "init", str(path))
    assert path.read_bytes() == (ROOT / "configs" / "vcache.yaml").read_bytes()
    assert (
        "File exists" in vcache("config", "init", str(path), "--like", "two-gpus", expect=1).stderr
    )
    assert vcache("config", "init", "-").stdout == path.read_text()
    assert vcache("config", "check", str(path)).stdout == f"{path}: ok\n"


def test_config_show_writes_every_default_out_and_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "shown.yaml"
    path.write_text(vcache("config", "show", "--socket", "/run/x.sock").stdout)
    loaded = config.load(path)
    assert loaded.server.path == Path("/run/x.sock")
    assert loaded.pool == config.Config().pool
    assert json.loads(vcache("config", "show", "--json").stdout)["pool"]["segment_bytes"] is None


def test_a_socket_of_the_command_line_is_meant_from_the_folder_it_is_typed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = json.loads(vcache("config", "show", "--json", "--socket", "here.sock").stdout)
    assert shown["server"]["socket"] == str(tmp_path / "here.sock")


def test_doctor_fails_exactly_when_a_finding_does() -> None:
    pytest.importorskip("vcache_backend.doctor")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    findings = json.loads(result.stdout)
    assert {"check", "status", "detail", "advice"} == set(findings[0])
    assert result.exit_code == any(finding["status"] == "fail" for finding in findings)
    shown = CliRunner().invoke(app, ["doctor"]).stdout
    assert findings[0]["check"] in shown
    assert re.fullmatch(r"\d+ findings: \d+ fail, \d+ warn", shown.splitlines()[-1])


def test_the_readme_names_only_commands_and_targets_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    commands = {command for named in COMMANDS for command in named[:1]} | {"bench"}
    assert set(re.findall(r"[`/]vcache ([a-z]+)", readme)) == commands
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= set(re.findall(r"(?:`|\$ )make ([a-z]+)", readme)) <= targets


# ---- with a server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`vcache serve` as a process of its own, which ends clean; its socket."""
    path = tmp_path_factory.mktemp("cli") / "vcache.sock"
    with Child([sys.executable, "-c", f"{BASE}; main()", "serve", "--socket", str(path)]) as child:
        child.expect("serving")
        yield path
        child.signal(signal.SIGINT)
        status, said = child.wait()
    assert (status, "Traceback" in said, path.exists()) == (0, False, False), said


def test_a_command_waits_longer_than_a_request_may(stage_: Stage, tmp_path: Path) -> None:
    server, file = stage_.server(), tmp_path / "vcache.yaml"
    file.write_text(f"client: {{control_seconds: {SECONDS}, request_seconds: 0.25}}")
    with command.client(file, stage_.path) as client:
        server.stop()
        later = threading.Timer(0.75, server.cont)
        later.start()
        assert client.list_segments() == []
        later.join()


def test_a_segment_is_lent_listed_shown_and_taken_back(server: Path) -> None:
    at = ("--socket", str(server))
    assert json.loads(vcache("segment", "list", "--json", *at).stdout) == []
    assert (
        "of host memory are available"
        in vcache("segment", "add", "--device", "host", "--bytes", "8TiB", *at, expect=1).stderr
    )
    assert (
        "64 MiB of host:a lent"
        in vcache("segment", "add", "--device", "host:a", "--bytes", "64MiB", *at).stdout
    )
    added = json.loads(
        vcache("segment", "add", "--device", "host:b", "--bytes", "1048576", "--json", *at).stdout
    )
    assert (added["device"], added["medium"], added["nbytes"]) == ("host:b", "host", 1 << 20)

    listed = json.loads(vcache("segment", "list", "--json", *at).stdout)
    assert {(info["device"], info["nbytes"], info["state"]) for info in listed} == {
        ("host:a", 64 << 20, "live"),
        ("host:b", 1 << 20, "live"),
    }
    assert added["id"] in vcache("segment", "list", *at).stdout
    shown = json.loads(vcache("status", "--json", *at).stdout)
    assert {info["id"] for info in shown["segments"]} == {info["id"] for info in listed}
    assert added["id"] in vcache("status", *at).stdout

    assert "gone" in vcache("segment", "drop", added["id"], "--wait", "5", *at).stdout
    assert [
        info["device"] for info in json.loads(vcache("segment", "list", "--json", *at).stdout)
    ] == ["host:a"]
    assert added["id"] in vcache("segment", "drop", added["id"], *at, expect=1).stderr
    assert vcache("clear", *at).stdout == "0 chunks forgotten\n"
    nothing = (
        "no chunks of namespace 00ff00ff00ff00ff are in the pool; `vcache status --all` "
        "lists the namespaces\n"
    )
    assert vcache("clear", "--namespace", "00ff00ff00ff00ff", *at).stdout == nothing


def test_the_base_install_does_all_but_move_kv_and_names_the_extra_for_that(server: Path) -> None:
    """The server of these tests is one, too."""
    plain = [
        ["version"],
        ["status"],
        ["segment", "list"],
        ["clear"],
        ["config", "show"],
        ["doctor", "--json"],
    ]
    moving = [["segment", "add", "--device", "host", "--bytes", "1MiB"], ["demo"]]
    program = (
        f"{BASE}; import json; from typer.testing import CliRunner; results = "
        f"(CliRunner().invoke(app, one) for one in {plain + moving});"
        "print(json.dumps([[one.exit_code, one.stdout, one.stderr] for one in results]))"
    )
    environment = {**os.environ, "VCACHE_SOCKET": str(server)}
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    results = json.loads(ran.stdout)
    assert [code for code, *_ in results[:5]] == [0] * 5, results
    assert {"torch", "server"} <= {finding["check"] for finding in json.loads(results[5][1])}
    for code, said, complaint in results[len(plain) :]:
        assert (code, said, complaint.count("\n")) == (1, "", 1)
        assert "pip install '/path/to/vcache[engine]'" in complaint


def test_a_second_server_on_the_same_socket_is_refused(server: Path) -> None:
    with Child([*VCACHE, "serve", "--socket", str(server)]) as child:
        status, said = child.wait()
    assert (status, "Traceback" in said) == (1, False)
    assert said.splitlines()[-1].startswith("vcache: ")
    config = server.with_name("json.yaml")
    config.write_text("server: {log_format: json}")
    with Child([*VCACHE, "serve", "--config", str(config), "--socket", str(server)]) as child:
        status, said = child.wait()
    (line,) = map(json.loads, said.splitlines())
    assert (status, line["level"], str(server) in line["message"]) == (1, "error", True)


def test_watch_writes_a_line_a_look_and_ends_clean_on_ctrl_c(server: Path) -> None:
    with Child(
        [*VCACHE, "status", "--watch", "--json", "--every", "0.1", "--socket", str(server)]
    ) as child:
        looks = [json.loads(child.expect("{")) for _ in range(3)]
        child.signal(signal.SIGINT)
        status, said = child.wait()
    assert (status, "Traceback" in said) == (0, False), said
    assert looks[0]["uptime_seconds"] < looks[2]["uptime_seconds"]


@pytest.mark.parametrize(
    ("arguments", "environment", "out", "code", "said"),
    [
        (["status"], {}, "/dev/full", 1, "vcache: [Errno 28] No space left on device\n"),
        (["status", "--json"], {}, "/dev/full", 1, "vcache: [Errno 28] No space left on device\n"),
        (["status"], {"PYTHONIOENCODING": "ascii"}, "/dev/null", 0, ""),
    ],
    ids=["full", "full-json", "ascii"],
)
def test_where_output_cannot_be_written_there_is_one_line_and_no_traceback(
    server: Path, arguments: list[str], environment: dict[str, str], out: str, code: int, said: str
) -> None:
    with open(out, "w") as file:
        ran = subprocess.run(
            [*VCACHE, *arguments, "--socket", str(server)],
            env={**os.environ, **environment},
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            timeout=SECONDS,
        )
    assert (ran.returncode, ran.stderr) == (code, said)


def test_watch_ends_with_its_reader(server: Path) -> None:
    """At once, and not with its next look, which is far away."""
    command = [*VCACHE, "status", "--watch", "--json", "--every", "3600", "--socket", str(server)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stderr is not None
            json.loads(child.stdout.readline())
            child.stdout.close()
            child.wait(SECONDS)
            assert child.stderr.read() == ""
        finally:
            child.kill()


def test_the_live_picture_fits_its_window_and_ends_clean_on_ctrl_c(server: Path) -> None:
    command, (ours, terminal) = (
        [*VCACHE, "status", "--watch", "--every", "0.1", "--socket", str(server)],
        os.openpty(),
    )
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", TALL, 80, 0, 0))
    environment, where = (
        {**os.environ, "TERM": "xterm"},
        {"stdin": subprocess.DEVNULL, "stdout": terminal, "stderr": terminal},
    )
    child = subprocess.Popen(command, env=environment, start_new_session=True, **where)
    shown = b""
    try:
        os.close(terminal)
        while shown.count(b"\x1b[2J") < 3:
            assert select.select([ours], [], [], SECONDS)[0], shown
            shown += os.read(ours, 1 << 16)
        child.send_signal(signal.SIGINT)
        with suppress(OSError):  # its end
            while piece := os.read(ours, 1 << 16):
                shown += piece
        assert (child.wait(SECONDS), b"Traceback" in shown) == (0, False), shown
        pictures = re.sub(rb"\x1b\[(?!2J)[0-9;]*[A-Za-z]", b"", shown).split(b"\x1b[2J")[1:-1]
        assert {len(picture.splitlines()) for picture in pictures} == {TALL - 1}, pictures[0]
        assert b"lines more" in pictures[0].splitlines()[-1]
    finally:
        child.kill()
        child.wait()
        os.close(ours)
