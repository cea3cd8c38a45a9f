"""What `vcache prove` has shown on this machine, in files in the user's state folder.

A file is believed only if this user owns it and its folder, and nobody else may write to either."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

import msgspec

from vcache_backend import __version__
from vcache_backend.config import state_folder
from vcache_backend.errors import ConfigError, VCacheError
from vcache_backend.supported import VLLM


@cache
def installed() -> str:
    """The version of vcache, and a digest of its files: code that was changed is not proved."""
    spec = find_spec("vcache_backend.integration")  # in a checkout beside the package
    beside = spec.submodule_search_locations if spec is not None else None
    return f"{__version__}+{digest(Path(__file__).parent, *map(Path, beside or ()))}"


def digest(*folders: Path) -> str:
    """A digest of the Python files in these folders: their names and what they say."""
    made = blake2b(digest_size=4)
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            made.update(msgspec.json.encode((str(file.relative_to(folder)), file.read_bytes())))
    return made.hexdigest()


class Combination(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a proof is about. vllm, torch: versions. vcache: see `installed`. device: vLLM's name of
    the GPU, or `cpu`. share: `in_place` or `pool`."""

    vllm: str
    torch: str
    device: str
    share: str
    vcache: str = msgspec.field(default_factory=installed)


class Proof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """date: YYYY-MM-DD. model: with which it was shown."""

    combination: Combination
    date: str
    model: str


def standing(version: str, proof: Proof | None) -> str:
    """A version of vLLM, and for people what is known of it: `listed` if vcache was tested with it,
    `proved` and a date, or `unproved`."""
    known = f"proved {proof.date}" if proof is not None else "unproved"
    return f"{version}, {'listed' if VLLM.supports(version) else known}"


def find(wanted: Combination) -> Proof | None:
    """The believed proof of exactly this combination. Never raises."""
    return next((one for one in believed() if one.combination == wanted), None)


def believed() -> list[Proof]:
    """This user's proofs that can be believed. Never raises."""
    found = list[Proof]()
    with suppress(ConfigError, OSError), _own(state_folder(), os.O_DIRECTORY) as folder:
        for name in sorted(os.listdir(folder))[:1000]:
            # A named pipe would wait for a writer.
            flags = os.O_NOFOLLOW | os.O_NONBLOCK
            with suppress(OSError, msgspec.MsgspecError), _own(Path(name), flags, folder) as file:
                found.append(msgspec.json.decode(os.read(file, 1 << 16), type=Proof))
    return found


@contextmanager
def _own(path: Path, flags: int, folder: int | None = None) -> Iterator[int]:
    """Open a file or folder for reading. OSError unless this user owns it and nobody else may write
    to it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=folder)
    try:
        held = os.fstat(fd)
        if held.st_uid != os.geteuid() or held.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"others may have written {path}")
        yield fd
    finally:
        os.close(fd)


def write(proof: Proof) -> Path:
    """Write a proof, whole or not at all, in place of an earlier one of the same combination.
    Returns the file. VCacheError if that is impossible."""
    name = blake2b(msgspec.json.encode(proof.combination), digest_size=8).hexdigest()
    try:
        folder = state_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as made:
            with Path(made, "proof").open("wb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(msgspec.json.format(msgspec.json.encode(proof)))
                file.flush()
                os.fsync(file.fileno())
            os.replace(file.name, folder / f"{name}.json")
    except OSError as error:
        raise VCacheError(f"the proof cannot be kept: {error}") from error
    if find(proof.combination) != proof:
        raise VCacheError(f"{folder} cannot be believed: make it writable for this user alone")
    return folder / f"{name}.json"
