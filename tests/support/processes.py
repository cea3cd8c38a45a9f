"""Real processes for the tests: programs, functions in processes of their own, a metadata server;
and memfd segments.

Everything has a deadline. Every process dies with its test; who is left at the end is killed and
named."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import mmap
import multiprocessing
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
from raw_protocol import Raw

from vcache_backend.children import until
from vcache_backend.config import ClientConfig, ServerConfig
from vcache_backend.metadata_server.main import Server
from vcache_backend.metadata_server.slots import SLAB_BITS, SlotRegion
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.client import Client

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0
"""Nothing in these tests waits longer, however slow the machine."""
IMPORT_SECONDS = 240.0
"""Until a nursery has imported its modules on a busy machine."""
WARM = "VCACHE_TESTS_WARM"
"""The variable with the address of a nursery that has imported torch and vLLM, if there is one."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def ran(*command: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """A program that has ended, and what it said. more: as for `subprocess.run`."""
    given = {"cwd": ROOT, "capture_output": "stdout" not in more, "check": False} | more
    return subprocess.run(command, **{"timeout": 3 * SECONDS, "text": True} | given)


def asked(client: Client, *requests: str) -> int:
    """How many requests of these types the server has answered; of those for chunks: are they
    there, and where.
    """
    latency = client.stats().latency
    return sum(latency[name].count for name in requests or ("Find", "Pin") if name in latency)


def eventually(what: Callable[[], Any], seconds: float = SECONDS, every: float = 0.01) -> Any:
    """The first true answer of `what`; fails after `seconds`. every: seconds between two looks."""
    answer = until(what, seconds, every)
    assert answer, f"not true within {seconds:g} s"
    return answer


def command_line(pid: int) -> str:
    """Its words, with a space behind each; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def with_words(*words: str | Path) -> list[int]:
    """Other processes that have all of these on their command line."""
    pids = {int(entry) for entry in os.listdir("/proc") if entry.isdigit()} - {os.getpid()}
    return [pid for pid in sorted(pids) if all(str(one) in command_line(pid) for one in words)]


def descriptors_of(pid: int | str) -> list[str]:
    """What the process's file descriptors point to, in their order."""
    names = []
    for fd in sorted(map(int, os.listdir(f"/proc/{pid}/fd"))):
        with suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return names


def children_of(pid: int) -> list[int]:
    """In the order in which they were started."""
    pids = list[int]()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            pids += map(int, (task / "children").read_text().split())
    return pids


SEGMENTS = "/dev/shm/psm_", "/dev/shm/sem.mp-", "/dev/shm/vllm_dist_"


def segments_of(pid: int) -> set[Path]:
    """The shared memory that the process and those it has started have from Python and vLLM."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().split()
        found = {Path(word) for word in lines if word.startswith(SEGMENTS)}
        return found.union(*map(segments_of, children_of(pid)))
    return set()


class Process:
    """A process of this test, and the leader of a session: everything it starts ends with it.
    Leaving the context ends it.

    What a test leaves running is killed at the end of the tests, which fail and name it
    (`survivors`)."""

    def __init__(self, name: str, pid: int) -> None:
        self.name, self.pid = name, pid
        self._end: int | None = None
        # It may have ended already.
        with suppress(ProcessLookupError):
            self._end = os.pidfd_open(pid)
        test = os.environ.get("PYTEST_CURRENT_TEST", "no test")
        _running[self] = f"{name} (process {pid}) of {test}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *reason: object) -> None:
        if kind is not None and self in _running:
            with suppress(OSError, ValueError):
                _ended[_running[self]] = self.said()
        self.close()

    def said(self) -> str:
        """The end of what it has said, where that is kept."""
        return ""

    @property
    def alive(self) -> bool:
        return not self.ended()

    def ended(self, seconds: float = 0.0) -> bool:
        """Whether it has ended, or does within so many seconds."""
        return self._end is None or bool(select.select([self._end], [], [], seconds)[0])

    def signal(self, number: int) -> None:
        # Not to its number, which is another process's once it has been reaped.
        if self._end is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._end, number)

    def kill(self) -> None:
        """SIGKILL for it, not for what it has started; and gone. Idempotent."""
        if not self.ended():
            self.signal(signal.SIGKILL)
        assert self.ended(SECONDS), f"{self.name} does not end"

    def close(self) -> None:
        """SIGKILL for it and all it has started, and gone. Idempotent."""
        if _running.pop(self, None) is None:
            return
        # Nobody unlinks it for the killed. Once this has ended, its number may be another's.
        segments = segments_of(self.pid) if self.alive else set[Path]()
        # While its group has a process, nobody else gets its number; if somebody has it, there is
        # no such group any more.
        if not self.ended() or self._state() in ("", "Z"):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.kill()
        for segment in segments:
            segment.unlink(missing_ok=True)
        if self._end is not None:
            os.close(self._end)
            self._end = None

    def stop(self) -> None:
        """From now on it hangs, as far as anybody can tell."""
        self.signal(signal.SIGSTOP)
        eventually(lambda: self.ended() or self._state() == "T")

    def cont(self) -> None:
        self.signal(signal.SIGCONT)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.cont()

    def _state(self) -> str:
        """Of whoever has its number: a letter, as in ps; empty if nobody has."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""

    def descriptors(self, limit: int | None = None) -> set[int]:
        """Numbers of its open files; `limit` becomes its (soft) RLIMIT_NOFILE."""
        if limit is not None:
            _, hard = resource.prlimit(self.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (limit, hard))
        return {int(fd) for fd in os.listdir(f"/proc/{self.pid}/fd")}

    def fds(self) -> list[str]:
        """What its file descriptors point to."""
        return descriptors_of(self.pid)


_running: dict[Process, str] = {}


def survivors() -> list[str]:
    """Kill what is still running; the names of it."""
    left = dict(_running)
    for process in left:
        process.close()
    return list(left.values())


_ended: dict[str, str] = {}
"""What was said by those whose context an exception left."""


def last_words() -> dict[str, str]:
    """What the processes of a test have said that run, or ended with its failure, each under its
    name: why it failed may stand there.
    """
    told = _ended | {name: process.said() for process, name in _running.items()}
    # Workers without a log of their own share their nursery's.
    once = {said: name for name, said in told.items()}
    return {name: said for said, name in once.items() if said}


def forget_last_words() -> None:
    """The test is over."""
    _ended.clear()


class Child(Process):
    """A program, started as users start it. `expect` reads its output with a deadline."""

    def __init__(self, arguments: list[str], **environment: str) -> None:
        given = os.environ | {"PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"} | environment
        streams = {"stdin": subprocess.DEVNULL, "stdout": self._output()}
        streams |= {"stderr": subprocess.STDOUT}
        more: dict[str, Any] = {"start_new_session": True, "preexec_fn": _start}
        self.process = subprocess.Popen(arguments, cwd=ROOT, env=given, **streams, **more)
        super().__init__(" ".join(arguments)[:120], self.process.pid)

    def _output(self) -> int:
        """A file for what it says, of which nothing is read so far."""
        self._file, self._read = tempfile.TemporaryFile(), 0  # noqa: SIM115 - until `close`
        return self._file.fileno()

    def status(self) -> int:
        """Its exit status, once it has ended."""
        return self.process.wait(SECONDS)

    def expect(self, text: str, seconds: float = SECONDS) -> str:
        """The next line with `text`; fails if the child ends or takes longer."""

        def found() -> str:
            ended = self.ended()
            for line in self._rest().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    self._read += len(line)
                    if text in line.decode():
                        return line.decode().rstrip("\n")
            assert not ended, f"ended ({self.status()}) without {text!r}; it said:\n{self.said()}"
            return ""

        line: str = until(found, seconds)
        assert line, f"no {text!r} in {seconds:g} s; it said:\n{self.said()}"
        return line

    def wait(self, seconds: float = SECONDS) -> tuple[int, str]:
        """Its exit status and the rest of what it said."""
        assert self.ended(seconds), f"no end of {self.name} in {seconds:g} s: {self.said()}"
        return self.status(), self._rest().decode()

    def _rest(self) -> bytes:
        """All that was not read yet."""
        file = self._file.fileno()
        return os.pread(file, os.fstat(file).st_size - self._read, self._read)

    def said(self) -> str:
        """The end of all it has said so far."""
        file = self._file.fileno()
        at = max(0, os.fstat(file).st_size - 4000)
        return os.pread(file, 4000, at).decode(errors="replace")

    def kill(self) -> None:
        super().kill()
        self.status()

    def close(self) -> None:
        super().close()
        self._file.close()


class ForkedServer(Child):
    """`vcache serve`, forked from a process that has imported it, which is most of what its start
    costs.
    """

    def __init__(self, *arguments: str) -> None:
        self._status: int | None = None
        self._pipe, theirs = multiprocessing.Pipe()
        environment = os.environ | {"PYTHONPATH": python_path()}
        setting = {"folder": ROOT, "environment": environment, "apart": None}
        home = nursery("vcache_backend.cli", "vcache_backend.metadata_server.main")
        with theirs:
            pid = home.fork(setting, [theirs.fileno(), self._output()])
        Process.__init__(self, f"server {' '.join(arguments)}", pid)
        self._pipe.send_bytes(pickle.dumps((_serve, arguments, {})))

    def status(self) -> int:
        if self._status is None:
            try:
                self._status = pickle.loads(self._pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                self._status = -signal.SIGKILL
        return self._status

    def close(self) -> None:
        super().close()
        self._pipe.close()


def _serve(*arguments: str) -> None:
    """In the fork."""
    from nursery import say

    from vcache_backend.cli import app

    try:
        app(["serve", *arguments], prog_name="vcache")
    except SystemExit as ended:
        say(ended.code)
    sys.stderr.flush()
    os._exit(0)


def _start() -> None:
    """In the child: die with the parent, and hear Ctrl-C also where a shell started the tests in
    the background.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def python_path() -> str:
    """With all rooms of the tests: workers unpickle functions of test modules."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    rooms = sorted(str(room) for room in (ROOT / "tests").iterdir() if room.is_dir())
    return os.pathsep.join([str(ROOT), str(ROOT / "tests"), *rooms, *filter(None, given)])


# ---- functions in other processes


class Nursery:
    """A process that has imported modules, for others to be forked from it: that takes
    milliseconds. All processes of one run of tests share it. See `nursery`.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str | None]) -> None:
        self.name = f"the nursery of {', '.join(modules)}"
        # The process that ends with the tests, also with pytest-xdist.
        tests = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
        self.address = f"vcache-{tests}-{'-'.join(modules)}"
        """In the abstract namespace."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            if _bound(listener, f"\0{self.address}"):
                _start_nursery(listener, tests, modules, environment)
        self._socket = eventually(lambda: _connected(f"\0{self.address}"))
        atexit.register(self._socket.close)
        self._socket.settimeout(IMPORT_SECONDS)
        _, (self._log,), _, _ = socket.recv_fds(self._socket, 64, 1)

    def fork(self, setting: Mapping[str, Any], fds: Sequence[int]) -> int:
        """The number of a new process. Returns once all is imported."""
        socket.send_fds(self._socket, [pickle.dumps(dict(setting))], list(fds))
        answer = self._socket.recv(64)
        assert answer, f"{self.name} has ended; it said {self.said()}"
        return int(answer)

    def said(self) -> str:
        """The end of its output, and of that of processes without a log of their own."""
        size = os.fstat(self._log).st_size
        return os.pread(self._log, 4000, max(0, size - 4000)).decode(errors="replace")


def _bound(listener: socket.socket, address: str) -> bool:
    """Listen there, unless another process of this run does."""
    try:
        listener.bind(address)
    except OSError:
        return False
    listener.listen()
    return True


def _start_nursery(
    listener: socket.socket,
    tests: int,
    modules: Sequence[str],
    environment: Mapping[str, str | None],
) -> None:
    """In a new Python, or, of a large one, in a fork of the one that tests are forked from."""
    changed = {**os.environ, "PYTHONPATH": python_path(), **environment}
    given = {name: one for name, one in changed.items() if one is not None}
    warm = None if modules[0].startswith("vcache_backend") else os.environ.get(WARM)
    # CUDA ends processes that were forked twice from one that has imported vLLM.
    warm = None if Path("/dev/nvidiactl").exists() else warm
    with tempfile.TemporaryFile() as log, open(os.devnull) as nothing:
        fds = [nothing.fileno(), log.fileno(), log.fileno(), listener.fileno()]
        program = f"import nursery; nursery.main({{}}, {tests}, {list(modules)})"
        if warm is not None and (home := _connected(f"\0{warm}")) is not None:
            with home:
                home.recv(64)
                setting = {"environment": given, "program": program.format("fds[3]")}
                socket.send_fds(home, [pickle.dumps(setting)], fds)
                assert home.recv(64)
            return
        own: dict[str, Any] = {"pass_fds": fds[3:], "start_new_session": True, "cwd": ROOT}
        own |= {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
        command = [sys.executable, "-c", program.format(fds[3])]
        streams = {"stdin": nothing, "stdout": log, "stderr": log}
        subprocess.run(command, env=given, check=True, **streams, **own)


def _connected(address: str) -> socket.socket | None:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        made.connect(address)
    except OSError:
        made.close()
        return None
    return made


_starting: dict[tuple[str, ...], threading.Lock] = {}


def nursery(*modules: str, **environment: str | None) -> Nursery:
    """The one that has imported these, for all tests of this run. Its environment is that of its
    first use, with changes.
    """
    with _starting.setdefault(modules, threading.Lock()):
        return _nursery(*modules, **environment)


@functools.cache
def _nursery(*modules: str, **environment: str | None) -> Nursery:
    return Nursery(modules, environment)


def with_torch() -> Nursery:
    """The one for engines, and for owners and readers of KV caches: torch is imported once for them
    all.
    """
    return nursery("resident_cases")


class Apart(NamedTuple):
    """A container of its own for a worker: namespaces of pids, network, IPC and mounts. later:
    unless it is 0, one of time as well, whose clocks are so many seconds ahead. uid, gid: unless
    they are 0, a user, whose own group has the same number, in this group."""

    later: int = 0
    uid: int = 0
    gid: int = 0


IN_A_CONTAINER = ["unshare", "--pid", "--net", "--ipc", "--fork", "--mount-proc", "--kill-child"]
"""Before a program and its arguments."""


@functools.cache
def containers() -> str:
    """Why nothing here can be in a container of its own; empty if it can."""
    tried = subprocess.run([*IN_A_CONTAINER, "--time", "true"], capture_output=True, check=False)
    return tried.stderr.decode() or f"exit status {tried.returncode}" if tried.returncode else ""


class Failure(NamedTuple):
    """What went wrong inside a worker."""

    text: str


class Worker(Process):
    """An object in a process of its own, which is forked from a nursery.

    make: gets the arguments and makes it there, such as its class. It is called at once; `answer`,
    the first time, also waits until it is made (`start_seconds`). Everything travels as pickles.
    folder, environment: the process's own; log: for its output; apart: where it lives."""

    def __init__(
        self,
        home: Nursery,
        make: Callable[..., Any],
        *arguments: Any,
        name: str = "a worker",
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        patience: float = 2 * SECONDS,
        start_seconds: float = 2 * SECONDS,
        apart: Apart | None = None,
    ) -> None:
        self._home = home
        self._log = log
        self._patience = patience
        self._start_seconds = start_seconds
        self.folder = folder
        self._made = False
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs, ExitStack() as undo:
            fds = [theirs.fileno()]
            if log is not None:
                fds.append(undo.enter_context(log.open("ab")).fileno())
            pid = home.fork({"folder": folder, "environment": environment, "apart": apart}, fds)
        super().__init__(name, pid)
        self.tell(make, *arguments)

    def ask(
        self,
        what: Callable[..., Any] | str,
        *arguments: Any,
        seconds: float | None = None,
        **more: Any,
    ) -> Any:
        """What the object's method of this name, or a function that gets it, returns. Fails with
        the traceback of what it raises.
        """
        self.made()
        self.tell(what, *arguments, **more)
        return self.answer(seconds)

    def tell(self, what: Callable[..., Any] | str, *arguments: Any, **more: Any) -> None:
        """`ask` without waiting; `answer` waits."""
        self._pipe.send_bytes(pickle.dumps((what, arguments, more)))

    def answer(self, seconds: float | None = None) -> Any:
        """The next answer, or what the process said of its own accord."""
        self.made()
        return self._receive(self._patience if seconds is None else seconds)

    @property
    def answered(self) -> bool:
        """Whether an answer has come already."""
        return self._pipe.poll()

    def made(self) -> Self:
        """Wait until the object is there."""
        if not self._made:
            self._receive(self._start_seconds)
            self._made = True
        return self

    def said(self) -> str:
        """The end of what it has said, or all that came out of the same nursery."""
        return self.log[-4000:]

    @property
    def log(self) -> str:
        """All it has said so far."""
        return self._log.read_text(errors="replace") if self._log is not None else self._home.said()

    def close(self) -> None:
        super().close()
        self._pipe.close()

    def _receive(self, seconds: float) -> Any:
        try:
            said = f"{self.name} did not answer within {seconds:g} s; its log ends with\n"
            assert self._pipe.poll(seconds), said + self.log[-4000:]
            answer = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise AssertionError(f"{self.name} ended; its log:\n{self.log[-4000:]}") from None
        assert not isinstance(answer, Failure), f"{self.name}: {answer.text}"
        return answer


# ---- programs


def script(text: str, *arguments: str, **environment: str) -> Child:
    """A child that runs a few lines of Python; `sys.argv[1:]` are the arguments."""
    return Child([sys.executable, "-c", text, *arguments], **environment)


def start_server(path: Path, config: dict[str, Any], within: Sequence[str] = ()) -> Child:
    """A real metadata server, serving. `config` is its `server` section; `within`: see
    `IN_A_CONTAINER`.
    """
    program = [sys.executable, "-m", "vcache_backend", "serve"]
    arguments = ["--socket", str(path)]
    if config:
        file = path.with_suffix(".yaml")
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lines = [f"  {name}: {str(value).lower()}\n" for name, value in config.items()]
        file.write_text("".join(["server:\n", *lines]))
        arguments += ["--config", str(file)]
    child = Child([*within, *program, *arguments]) if within else ForkedServer(*arguments)
    try:
        child.expect("serving")
    except BaseException:
        child.close()
        raise
    return child


PATIENT = ClientConfig(
    connect_seconds=10, request_seconds=10, control_seconds=10, heartbeat_seconds=30
)
"""For tests that are about something else: a slow machine must not open the breaker."""
QUICK = msgspec.structs.replace(PATIENT, heartbeat_seconds=0.1, retry_seconds=0.02)
"""For servers that die and come back, which is noticed at once; but a machine that is slow for a
while is no dead server.
"""


@contextmanager
def hung(server: Process, *clients: Client) -> Iterator[None]:
    """The server hangs, which costs each call of these clients its deadline. It is short for so
    long only: a machine that stalls misses such a one at any time."""
    with hurried(*clients), server.stopped():
        yield


@contextmanager
def hurried(*clients: Client) -> Iterator[None]:
    """These clients have short deadlines for a while."""
    kept = [client._config for client in clients]
    for client in clients:
        _configure(client, hasty(client._config))
    try:
        yield
    finally:
        for client, config in zip(clients, kept, strict=True):
            _configure(client, config)


def _configure(client: Client, config: ClientConfig) -> None:
    client._config, client.request_seconds = config, config.request_seconds


HASTY_SECONDS = 0.25
"""A short deadline for an answer: see `hasty`."""


def hasty(config: ClientConfig) -> ClientConfig:
    """The same with short deadlines. For nothing that must be answered."""
    short = {"connect_seconds": 0.5, "control_seconds": 0.5}
    return msgspec.structs.replace(config, request_seconds=HASTY_SECONDS, **short)


@contextmanager
def running(path: Path, **config: Any) -> Iterator[Server]:
    """A metadata server in this process, so that its constants can be changed."""
    server = Server(ServerConfig(socket=str(path), **config))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(SECONDS)
        assert not thread.is_alive()


class Stage:
    """A socket path, the servers started on it and the clients connected to it; closed in the right
    order.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "vcache.sock"
        self.undo = ExitStack()
        self.servers: list[Child] = []

    def server(self, within: Sequence[str] = (), **config: Any) -> Child:
        self.servers.append(self.undo.enter_context(start_server(self.path, config, within)))
        return self.servers[-1]

    def client(self, config: ClientConfig = PATIENT, device: str = "host", **more: Any) -> Client:
        return self.undo.enter_context(Client(self.path, config, device, "host", **more))

    def script(self, text: str, *arguments: str) -> Child:
        """A child with the socket's path as its first argument."""
        return self.undo.enter_context(script(text, str(self.path), *arguments))

    def raw(self, hello: bool = True) -> Raw:
        return self.undo.enter_context(Raw(self.path, hello))


@contextmanager
def stage(folder: Path) -> Iterator[Stage]:
    made = Stage(folder)
    with made.undo:
        yield made


# ---- tables of slots


def pool_keys(path: Path) -> list[m.ChunkKey]:
    """Of the chunks in the pool, as its tables say."""
    keys = list[m.ChunkKey]()
    with Client(path, PATIENT, reconnect=False) as client:
        for segment in client.list_segments():
            opened, fd, table_fd = client.open_segment(segment.id)
            os.close(fd)
            with theirs(table_fd) as region:
                for number, slab in enumerate(region.slabs):
                    slots = region.occupied(number << SLAB_BITS, slab.slots)
                    keys += [slot.key for slot in slots if slot.committed]
            assert opened.id == segment.id
    return keys


@contextmanager
def theirs(fd: int) -> Iterator[SlotRegion]:
    """A server's table, without its lock. Closes fd."""
    file = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    os.close(fd)
    with closing(SlotRegion(info("", 1), file, mmap.mmap(file, 0))) as region:
        yield region


@contextmanager
def leaving_nothing(path: Path) -> Iterator[None]:
    """The server ends in this block, and leaves no chunk to the next one: its tables are dead."""
    with Client(path, PATIENT, reconnect=False) as client, ExitStack() as undo:
        tables = list[SlotRegion]()
        for segment in client.list_segments():
            _, fd, table = client.open_segment(segment.id)
            os.close(fd)
            tables.append(undo.enter_context(theirs(table)))
        yield
        for table in tables:
            table.give_up()


# ---- segments


def make_memfd(nbytes: int, seals: bool = True) -> int:
    """Shared memory as a host segment is: sealed against shrinking and growing."""
    fd = os.memfd_create("vcache-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seals:
        resizing = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, resizing | fcntl.F_SEAL_SEAL)
    return fd


def info(name: str, nbytes: int, device: str = "host") -> m.SegmentInfo:
    return m.SegmentInfo(m.SegmentId(name), device, "host", nbytes)
