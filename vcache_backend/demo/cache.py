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
            want = torch.full_like(words, self._poison)
            want[:, places[:retrieved]] = content(digests[:retrieved], layer, self.shape.row_words)
            if not torch.equal(words, want):
                found.append(self._fault(layer, words.view(torch.uint8) != want.view(torch.uint8), places, retrieved))
        return found

    def _fault(self, layer: int, differs: torch.Tensor, places: torch.Tensor, retrieved: int) -> Fault:
        """`differs`: bytes (2, blocks, row). The fault names the first token that differs, of the prompt's if there is one."""
        blocks = differs.any(2).any(0)
        rows = blocks[places].nonzero().flatten().tolist()
        block = int(places[rows[0]]) if rows else int(blocks.nonzero()[0])
        row = differs[:, block].any(0)
        token = rows[0] * self.shape.block_size + int(row.nonzero()[0]) * self.shape.block_size // len(row) if rows else -1
        return Fault("wrong" if rows and rows[0] < retrieved else "stray", layer, block, token, int(differs.sum()))
