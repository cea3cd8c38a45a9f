"""What the tests of the LMCache plugin share: LMCache's YAML, processes with real engines in them,
and a node with a server for them.

LMCache is imported in child processes only; here nothing of it is needed.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
import yaml
from engine_cases import Node
from engine_cases import node as engine_node
from kv_cases import CHUNK, PACKED, SMALL, Arrangement, Cache
from processes import PATIENT, Worker, eventually
from vllm_cases import changed, home

from benchmarks.vllm.settings import lmcache as lmcache_settings
from vcache_backend.config import ClientConfig
from vcache_backend.integration.lmcache.scheduler import PLAIN, TAG
from vcache_backend.protocol.client import Client

if TYPE_CHECKING:
    from lmcache_worker import Inside

LACKS_LMCACHE = importlib.util.find_spec("lmcache") is None
needs_lmcache = pytest.mark.skipif(LACKS_LMCACHE, reason="LMCache is not installed")
SLOW = 60.0
"""Importing LMCache, with vLLM behind it, on a busy machine."""
TAGGED = {"request_configs": {TAG: PLAIN}}
"""What the plugin's hook in vLLM's scheduler gives a request."""
CHUNKS = 16
"""Chunks that the engines of a test lend to the pool, if nothing else is said: they share one
segment, being on one device.
"""


def tokens(count: int, family: int = 1) -> list[int]:
    """`count` tokens; those of one family are prefixes of one another, and no token is in two
    families.
    """
    return [family * 1_000_000 + i for i in range(count)]


def chunks(count: int, family: int = 1) -> list[int]:
    """The tokens of so many chunks."""
    return tokens(count * CHUNK, family)


def settings(
    socket: Path,
    lent: int,
    client: ClientConfig = PATIENT,
    extra: dict[str, Any] | None = None,
    **lmcache: Any,
) -> dict[str, Any]:
    """LMCache's configuration as a user of vcache writes it. extra: sections of ours; the rest are
    LMCache's own.
    """
    own = {"server": {"socket": str(socket)}, "client": msgspec.structs.asdict(client)}
    own |= {"pool": {"device": "host", "segment_bytes": f"{lent} B"}} | (extra or {})
    theirs = {"chunk_size": CHUNK, "pre_caching_hash_algorithm": "sha256_cbor"} | lmcache
    return lmcache_settings({"vcache": own}, theirs)


def kv_transfer(adapter: Any, kind: Any, blocks: int, several: bool = False) -> Any:
    """vLLM's module that has its KV connectors, of which one is LMCache's with this adapter. kind:
    of its layers, with a block table of `blocks` blocks."""
    groups = [SimpleNamespace(kv_cache_spec=kind)]
    kv_config = SimpleNamespace(num_blocks=blocks, kv_cache_groups=groups)
    group = SimpleNamespace(_lmcache_engine=adapter, _kv_cache_config=kv_config)
    if several:
        both = [SimpleNamespace(), group]
        group = SimpleNamespace(_connectors=both, _kv_cache_config=kv_config)
    return SimpleNamespace(has_kv_transfer_group=lambda: True, get_kv_transfer_group=lambda: group)


class Setup(NamedTuple):
    """What a child is made of. yaml: the file that LMCache loads. before: called first, with
    nothing made yet.

    service: the name under which LMCache's look-up servers of all ranks and its look-up
    client find each other; empty: there are none. plant: a bug, or something else to do to the
    child once it is complete."""

    yaml: Path
    arrangement: Arrangement
    rank: int = 0
    ranks: int = 1
    service: str = ""
    before: Callable[[], None] | None = None
    plant: Callable[[Inside], None] | None = None


class Retrieved(NamedTuple):
    """first, tokens: where the tokens that LMCache says are there begin, and how many follow.
    right: every byte of the KV cache is as it must be: those tokens' KV in their slots, nothing
    changed anywhere else."""

    first: int
    tokens: int
    right: bool


@functools.cache
def _folder() -> str:
    """Sockets in pytest's own folders have names that are too long."""
    folder = tempfile.mkdtemp(prefix="vcache-lm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _inside(setup: Setup) -> Inside:
    import lmcache_worker

    return lmcache_worker.Inside(setup)


class Engine(Worker):
    """A process with an LMCacheEngine, seen from outside. Every answer has a deadline; leaving the
    context kills it.
    """

    def __init__(self, setup: Setup) -> None:
        folders = dict.fromkeys(("VLLM_RPC_BASE_PATH", "PROMETHEUS_MULTIPROC_DIR"), _folder())
        more = {"environment": changed(folders), "start_seconds": SLOW}
        super().__init__(home(), _inside, setup, name="an engine", **more)
        self.made()

    def store(self, tokens: list[int], skip: int = 0) -> None:
        assert self.ask("store", tokens, skip)

    def lookup(self, tokens: list[int], request: str = "") -> int:
        return self.ask("lookup", tokens, request)

    def retrieve(self, tokens: list[int], request: str = "r", cached: int = 0) -> Retrieved:
        return self.ask("retrieve", tokens, request, cached)


class Pool:
    """A node with a metadata server, and LMCache engines that share its pool."""

    def __init__(self, folder: Path, here: Node) -> None:
        self.folder, self.node = folder, here
        self._made = 0

    def yaml(self, lent: int, **options: Any) -> Path:
        """A new file. options: see `settings`."""
        self._made += 1
        file = self.folder / f"lmcache-{self._made}.yaml"
        file.write_text(yaml.safe_dump(settings(self.node.path, lent, **options)))
        return file

    def engine(
        self,
        arrangement: Arrangement = PACKED,
        lent: int = CHUNKS,
        process: dict[str, Any] | None = None,
        **options: Any,
    ) -> Engine:
        """An engine in a process of its own, lending room for `lent` chunks. process: of `Setup`;
        options: see `settings`.
        """
        nbytes = lent * Cache(arrangement, SMALL._replace(blocks=1)).chunk_bytes
        setup = Setup(self.yaml(nbytes, **options), arrangement, **(process or {}))
        return self.node.undo.enter_context(Engine(setup))

    def stats(self) -> Any:
        return self._client.stats()

    @functools.cached_property
    def _client(self) -> Client:
        """A bystander's."""
        return self.node.client()

    def settled(self) -> bool:
        """Whether all reservations are over, soon."""
        return bool(eventually(lambda: not self.stats().reservations))


# ---- what test modules import: fixtures, and what a retrieval should have brought


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    """Without its server yet: `pool.node.serve()`."""
    with engine_node(tmp_path) as here:
        yield Pool(tmp_path, here)


@pytest.fixture
def served(pool: Pool) -> Pool:
    pool.node.serve()
    return pool


def all_of(count: int, first: int = 0) -> Retrieved:
    """What a retrieval says that brought `count` tokens from `first` on, and every byte is
    right.
    """
    return Retrieved(first, count, True)
