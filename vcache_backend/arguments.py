"""What callers pass to the engine, checked and in one form."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

SlotMapping = torch.Tensor | npt.NDArray[np.int64]


def first_wanted(mask: object, size: int) -> int:
    """Index of the first token the mask wants, `size` if none. ValueError unless the mask is False on a prefix only."""
    if mask is None:
        return 0
    if not isinstance(mask, torch.Tensor) or mask.shape != (size,) or mask.dtype != torch.bool:
        given = f"{tuple(mask.shape)} {mask.dtype}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"mask is {given}; expected ({size},) torch.bool, one for each token")
    wanted = int(mask.sum())
    if not bool(mask[size - wanted :].all()):
        raise ValueError("mask must be False on a prefix and True on the rest; it has False after True")
    return size - wanted


def as_slots(slot_mapping: SlotMapping, size: int, offset: int) -> npt.NDArray[np.int64]:
    """One slot for each of `size` tokens, -1 before `offset`. ValueError if slots are missing."""
    if isinstance(slot_mapping, torch.Tensor):
        slot_mapping = slot_mapping.detach().cpu().numpy()
    given = np.asarray(slot_mapping)
    if given.size and given.dtype.kind not in "iu":
        raise ValueError(f"slot_mapping has type {given.dtype}; expected integers")
    slots = np.ascontiguousarray(given, dtype=np.int64)
    if slots.ndim != 1 or len(slots) != size - offset or offset < 0:
        raise ValueError(f"slot_mapping has shape {slots.shape}; expected ({size} tokens - offset {offset},)")
    return slots if not offset else np.concatenate([np.full(offset, -1, dtype=np.int64), slots])
