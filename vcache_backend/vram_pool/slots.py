"""A slot as this process sees it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SlotView(NamedTuple):
    """`nbytes` bytes at `address`, mapped for as long as this view is held.

    local: the bytes lie on the KV cache's device. whole, offset: a contiguous 1-D uint8 tensor, and
    the index in `whole` of the first byte."""

    address: int
    nbytes: int
    local: bool
    whole: Tensor
    offset: int

    @property
    def tensor(self) -> Tensor:
        """The bytes as contiguous 1-D uint8. Built on demand: kernels need only the address."""
        return self.whole[self.offset : self.offset + self.nbytes]

    @classmethod
    def over(cls, tensor: Tensor, *, local: bool) -> SlotView:
        """A view of all of `tensor`, contiguous 1-D uint8."""
        return cls(tensor.data_ptr(), tensor.numel(), local, tensor, 0)
