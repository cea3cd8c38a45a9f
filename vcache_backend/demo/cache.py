"""One worker's paged KV cache: places for blocks, their content, and the check that finds a wrong byte and says where it is."""

from __future__ import annotations

from typing import Literal

import msgspec
import torch

from vcache_backend.demo.content import Shape, content, poison


class Fault(msgspec.Struct, frozen=True):
    """Bytes that are not what they must be. `wrong`: in a token that was retrieved; `stray`: anywhere else.

    `token` is the position in the request's prompt, or -1 in a block the request does not have.
    """

    kind: Literal["wrong", "stray"]
    layer: int
    block: int
    token: int
    nbytes: int

    def __str__(self) -> str:
        where = f"layer {self.layer}, token {self.token}" if self.token >= 0 else f"layer {self.layer}, cache block {self.block}"
        return f"{self.nbytes:,} {self.kind} byte{'s' * (self.nbytes != 1)} in {where}"


class PagedCache:
    """KV tensors as vLLM has them. Between requests every block is poisoned. One thread; copies run on the current stream."""

    def __init__(self, shape: Shape, blocks: int, device: torch.device, worker: int) -> None:
        self.shape, self.blocks, self.device = shape, blocks, device
        self._poison = poison(worker)
        size = (2, blocks, shape.block_size, shape.kv_heads, shape.head_dim)
        self.kvcaches = [torch.empty(size, dtype=torch.bfloat16, device=device) for _ in range(shape.layers)]
        self._words = [layer.view(2, blocks, -1).view(torch.int64) for layer in self.kvcaches]
        for words in self._words:
            words.fill_(self._poison)

    def slots(self, places: torch.Tensor, tokens: int) -> torch.Tensor:
        """The slot mapping of a prompt whose blocks lie at `places`: one int64 a token."""
        size = self.shape.block_size
        return (places[:, None] * size + torch.arange(size, device=places.device)).flatten()[:tokens]

    def prefill(self, places: torch.Tensor, digests: torch.Tensor) -> None:
        """Write the content of these blocks, as a model would."""
        for layer, words in enumerate(self._words):
            words[:, places] = content(digests, layer, self.shape.row_words)

    def forget(self, places: torch.Tensor) -> None:
        """Poison the blocks of a finished request."""
        for words in self._words:
            words[:, places] = self._poison

    def faults(self, places: torch.Tensor, digests: torch.Tensor, retrieved: int) -> list[Fault]:
        """Check all layers wholly: the first `retrieved` blocks of the prompt at `places` hold their content, all others poison."""
        found = []
        for layer, words in enumerate(self._words):
            want = content(digests[:retrieved], layer, self.shape.row_words)
            have = words[:, places[:retrieved]]
            if not torch.equal(have, want):
                found.append(self._fault("wrong", layer, have, want, places))
            touched = (words != self._poison).any(2).any(0)
            touched[places[:retrieved]] = False
            if bool(touched.any()):
                found.append(self._stray(layer, touched.nonzero().flatten(), places))
        return found

    def _fault(
        self, kind: Literal["wrong", "stray"], layer: int, have: torch.Tensor, want: torch.Tensor, at: torch.Tensor
    ) -> Fault:
        """`have` and `want` are words (2, blocks, row) of the blocks `at`; the fault names the first token that differs."""
        differs = have.contiguous().view(torch.uint8) != want.contiguous().view(torch.uint8)
        count, differs = int(differs.sum()), differs.any(0)
        row, byte = (int(i) for i in differs.nonzero()[0])
        token = row * self.shape.block_size + byte * self.shape.block_size // differs.shape[1]
        return Fault(kind, layer, int(at[row]), token, count)

    def _stray(self, layer: int, blocks: torch.Tensor, places: torch.Tensor) -> Fault:
        have = self._words[layer][:, blocks]
        fault = self._fault("stray", layer, have, torch.full_like(have, self._poison), blocks)
        row = (places == fault.block).nonzero().flatten()
        inside = fault.token % self.shape.block_size
        token = int(row[0]) * self.shape.block_size + inside if len(row) else -1
        return msgspec.structs.replace(fault, token=token)
