"""What `vcache prove` has shown on this machine, in files in the user's state folder."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import msgspec

from vcache_backend import __version__
from vcache_backend.config import state_folder
from vcache_backend.errors import ConfigError, VCacheError
from vcache_backend.protocol.sockets import folder_fault
from vcache_backend.supported import VLLM

TRUSTED = frozenset((os.getuid(), 0))
"""Proofs of other users are not believed, nor those that others can write."""
OWN_FOLDER = "set XDG_STATE_HOME to a folder of your own"


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

    @classmethod
    def here(cls, share: str) -> Self:
        """What would have to be proved for this process's vLLM."""
        import torch
        import vllm
        from vllm.platforms import current_platform

        device = current_platform.get_device_name()
        return cls(vllm=vllm.__version__, torch=str(torch.__version__), device=device, share=share)


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
    """The proof of exactly this combination. Never raises."""
    return next((one for one in believed() if one.combination == wanted), None)


def believed() -> list[Proof]:
    """This user's proofs that can be read, and that nobody else could have written. Never
    raises."""
    found = list[Proof]()
    with suppress(ConfigError, OSError):
        for file in sorted(state_folder().glob("*.json")) if not unbelieved() else ():
            with suppress(OSError, msgspec.MsgspecError):
                status = file.stat()
                own = status.st_uid in TRUSTED and not status.st_mode & 0o022
                if own and stat.S_ISREG(status.st_mode):  # a named pipe would wait for a writer
                    found.append(msgspec.json.decode(file.read_bytes(), type=Proof))
    return found


def unbelieved() -> str:
    """Why no proof in this user's state folder would be believed, and what to do; empty if one
    would, or there is no folder. Never raises."""
    with suppress(ConfigError, OSError):
        return folder_fault(state_folder() / "proof", TRUSTED, OWN_FOLDER)
    return ""


def room() -> Path:
    """The folder for proofs, made if necessary. VCacheError if no proof can be written there, or
    none there would be believed."""
    try:
        folder = state_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fault = unbelieved()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))  # or fails: the disk is full
            file.flush()
    except OSError as error:
        raise VCacheError(f"the proof cannot be kept: {error}; {OWN_FOLDER}") from error
    if fault:
        raise VCacheError(f"the proof cannot be kept: {fault}")
    return folder


def write(proof: Proof) -> Path:
    """Write a proof, whole or not at all, in place of an earlier one of the same combination.
    Returns the file. VCacheError if that is impossible."""
    name = blake2b(msgspec.json.encode(proof.combination), digest_size=8).hexdigest()
    folder = room()
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as made:
            with Path(made, "proof").open("wb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(msgspec.json.format(msgspec.json.encode(proof)))
                file.flush()  # or fails: without a buffer a full disk would cut the file
                os.fsync(file.fileno())
            os.replace(file.name, folder / f"{name}.json")
    except OSError as error:
        raise VCacheError(f"the proof cannot be kept: {error}; {OWN_FOLDER}") from error
    return folder / f"{name}.json"
