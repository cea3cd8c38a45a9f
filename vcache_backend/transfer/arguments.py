"""Checks and converts the arguments of the engine's calls. A ValueError explains a fault."""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from vcache_backend.protocol.messages import KEY_BYTES, ChunkKey

SlotMapping = torch.Tensor | npt.NDArray[np.int64]
KVCaches = Sequence[torch.Tensor] | Mapping[str, torch.Tensor]


def first_wanted(mask: object, size: int) -> int:
    """Find the first wanted token of the mask; `size` without one. The mask None wants all.
    ValueError if False comes after True."""
    if mask is None:
        return 0
    expected = f"expected ({size},) torch.bool, one for each token"
    if not isinstance(mask, torch.Tensor):
        raise ValueError(f"mask is {type(mask).__name__}; {expected}")
    if mask.shape != (size,) or mask.dtype != torch.bool:
        raise ValueError(f"mask is {tuple(mask.shape)} {mask.dtype}; {expected}")
    try:
        wanted = int(mask.sum())
        prefix_only = bool(mask[size - wanted :].all())
    except RuntimeError as error:  # a meta tensor, for example
        raise ValueError(f"mask cannot be read: {error}") from error
    if not prefix_only:
        raise ValueError("mask must be False on a prefix and then True; it has False after True")
    return size - wanted


def as_slots(slot_mapping: SlotMapping, size: int, offset: int) -> npt.NDArray[np.int64]:
    """Convert a slot mapping to shape (size,), int64, with -1 before `offset`. slot_mapping: the
    slots of tokens [offset, size). ValueError."""
    try:
        offset = operator.index(offset)
        if isinstance(slot_mapping, torch.Tensor):
            slot_mapping = (slot_mapping.cpu() if slot_mapping.is_cuda else slot_mapping).numpy()
        given = np.asarray(slot_mapping)
    except Exception as error:  # whatever a foreign object raises
        raise ValueError(
            f"slot_mapping or offset {offset!r} cannot be read: {type(error).__name__}: {error}"
        ) from error
    if given.size and given.dtype.kind not in "iu":
        raise ValueError(f"slot_mapping has type {given.dtype}; expected integers")
    if given.size and given.dtype == np.uint64 and int(given.max()) >= 1 << 63:
        raise ValueError(f"slot_mapping names slot {given.max()}; expected 64-bit signed integers")
    slots = np.ascontiguousarray(given, dtype=np.int64)
    if slots.ndim != 1 or len(slots) != size - offset or offset < 0:
        raise ValueError(
            f"slot_mapping has shape {slots.shape}; expected ({size} tokens - offset {offset},)"
        )
    return slots if not offset else np.concatenate([np.full(offset, -1, dtype=np.int64), slots])


def as_kvcaches(kvcaches: object) -> list[torch.Tensor]:
    """The KV caches, a tensor for each layer, in the given order. ValueError unless dense."""
    if isinstance(kvcaches, Sequence):
        given = list(kvcaches)
        if all(isinstance(kv, torch.Tensor) and kv.layout == torch.strided for kv in given):
            return given
    wanted = "one dense torch.Tensor a layer, in a list or by name"
    raise ValueError(f"kvcaches is a {type(kvcaches).__name__}; expected {wanted}")


def as_salt(salt: object) -> bytes:
    """Convert the salt to bytes; empty for None: no salt, as in vLLM and LMCache. ValueError."""
    if salt is None:
        return b""
    if not isinstance(salt, bytes | bytearray | memoryview):
        raise ValueError(f"salt is a {type(salt).__name__}; expected bytes, or None for none")
    return bytes(salt)


def as_key(cache_key: object) -> ChunkKey:
    if isinstance(cache_key, bytes) and len(cache_key) == KEY_BYTES:
        return ChunkKey(cache_key)
    size = f"{len(cache_key)} " if isinstance(cache_key, bytes) else "a "
    given = f"{size}{type(cache_key).__name__}"
    raise ValueError(f"cache_key is {given}; expected {KEY_BYTES} bytes, one of `keys(tokens)`")


def as_seconds(timeout: object) -> float:
    """Convert a timeout to seconds, limited to the longest wait of a lock. ValueError for NaN and
    for values that are no number."""
    if not isinstance(timeout, int | float) or timeout != timeout:
        raise ValueError(f"timeout is {timeout!r}; expected seconds")
    return min(max(timeout, 0.0), threading.TIMEOUT_MAX / 2)
