"""A real Mooncake store for tests, which is that of the benchmarks, and what talks to it past
everything of ours.

Import the fixtures you use: `depot` (shared by the whole session: leave it as it is), `raw` and
`model` for it, `own_depot` (to be broken), `hung_depot` (whose provider may hang)."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from mooncake_store import Depot, missing
from processes import SECONDS

from vcache_backend.config import MooncakeConfig
from vcache_backend.offload.process import STORED, OffloadProcess, StoreDown

MIB = 1 << 20
MISSING = missing()
needs_mooncake = pytest.mark.skipif(bool(MISSING), reason=MISSING or "Mooncake is here")


class Raw:
    """The store itself, past everything of ours but its process: objects as bytes. Leaving the
    context kills the process.
    """

    def __init__(self, config: MooncakeConfig, nbytes: int = 8 * MIB) -> None:
        """nbytes: the most that one call puts or gets."""
        self._fd = os.memfd_create("raw")
        os.ftruncate(self._fd, nbytes)
        self.memory = mmap.mmap(self._fd, nbytes)
        self.process = OffloadProcess(config, self._fd)

    def __enter__(self) -> Self:
        try:
            self.call("open")
        except StoreDown:
            self.__exit__()
            raise
        return self

    def __exit__(self, *reason: object) -> None:
        self.process.kill()
        os.close(self._fd)

    def call(self, verb: str, *arguments: Any, seconds: float = SECONDS) -> Any:
        return self.process.call(verb, *arguments, seconds=seconds)

    def there(self, names: Sequence[str]) -> list[bool]:
        return list(self.call("exist", names))

    def put(self, names: Sequence[str], objects: Sequence[bytes]) -> list[str]:
        """STORED, FULL or FAILED for each."""
        places, at = [], 0
        for data in objects:
            self.memory[at : at + len(data)] = data
            places.append((at, len(data)))
            at += len(data)
        return list(self.call("put", names, places))

    def get(self, names: Sequence[str], nbytes: int = MIB) -> list[bytes]:
        """Objects of at most so many bytes; empty where there is none."""
        self.memory[:] = bytes(len(self.memory))
        sizes = self.call("get", names, [(number * nbytes, nbytes) for number in range(len(names))])
        return [self.memory[at * nbytes : at * nbytes + size] for at, size in enumerate(sizes)]

    def remove(self, names: Sequence[str]) -> None:
        self.call("remove", names)

    def damage(self, name: str) -> None:
        """Change the sign of every number in an object's second half."""
        (data,) = self.get([name])
        half = len(data) // 2
        self.remove([name])
        changed = data[:half] + bytes(byte ^ 0x80 for byte in data[half:])
        assert self.put([name], [changed]) == [STORED]


def names_in(store: Depot) -> set[str]:
    """Of all objects."""
    return set(store.master.ask("/get_all_keys").split())


def new_names(count: int) -> list[str]:
    """Names of objects that nobody has seen."""
    stem = secrets.token_hex(8)
    return [f"vcache1/{stem}{number:04x}" for number in range(count)]


@pytest.fixture(scope="session")
def depot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Depot]:
    """Shared by the session: two providers of 128 MiB. Do not break it."""
    with Depot(tmp_path_factory.mktemp("mooncake"), (128 * MIB, 128 * MIB)) as made:
        yield made


@pytest.fixture(scope="module")
def raw(depot: Depot) -> Iterator[Raw]:
    """Of `depot`; shared by the module: leave it open."""
    with Raw(depot.config(), 16 * MIB) as made:
        yield made


@pytest.fixture
def hung_depot(tmp_path: Path) -> Iterator[Depot]:
    """A test's own, one provider of 64 MiB, which may hang for as long as a test takes on a busy
    machine: after 3 s `own_depot`'s master would take it for dead, and forget its objects.
    """
    with Depot(tmp_path / "mooncake", (64 * MIB,), client_ttl=600) as made:
        yield made


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    """Nobody else's in the shared store."""
    return str(request.node.nodeid)


@pytest.fixture
def own_depot(tmp_path: Path) -> Iterator[Depot]:
    """A test's own, one provider of 64 MiB, to be broken. A dead provider is forgotten after 3 s,
    not 10.
    """
    with Depot(tmp_path / "mooncake", (64 * MIB,), client_ttl=3) as made:
        yield made
