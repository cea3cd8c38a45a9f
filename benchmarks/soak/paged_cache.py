"""The paged KV cache of a worker of the soak, and the check that finds wrong bytes in it."""

from __future__ import annotations

from typing import Literal

import msgspec
import torch

from ..kv_content import Shape, content, poison


class Fault(msgspec.Struct, frozen=True):
    """The wrong bytes of one layer. nbytes: how many. block, token: where the first one is, those
    of the prompt before others.

    kind: `wrong` if it is in a block that was retrieved, else `stray`. token: position in the
    prompt, -1 outside of the prompt's blocks."""

    kind: Literal["wrong", "stray"]
    layer: int
    block: int
    token: int
    nbytes: int


class PagedCache:
    """KV tensors as vLLM has them; `shape` says which. Between requests every block holds poison
    (`content.poison`). One thread.

    places: the blocks of a prompt in this cache, int64. digests: one int64 for each of them: see
    `content.block_digests`."""

    def __init__(self, shape: Shape, blocks: int, device: torch.device, worker: int) -> None:
        self.shape, self.blocks, self.device = shape, blocks, device
        self._poison = poison(worker)
        size = (2, blocks, shape.block_size, shape.kv_heads, shape.head_dim)
        self.kvcaches = [
            torch.empty(size, dtype=torch.bfloat16, device=device) for _ in range(shape.layers)
        ]
        self._words = [layer.view(2, blocks, -1).view(torch.int64) for layer in self.kvcaches]
        for words in self._words:
            words.fill_(self._poison)

    def slots(self, places: torch.Tensor, tokens: int) -> torch.Tensor:
        """The slot mapping of a prompt of `tokens` tokens at `places`: one int64 a token."""
        size = self.shape.block_size
        return (places[:, None] * size + torch.arange(size, device=places.device)).flatten()[
            :tokens
        ]

    def prefill(self, places: torch.Tensor, digests: torch.Tensor) -> None:
        """Write the content of blocks, as a model would."""
        for layer, words in enumerate(self._words):
            words[:, places] = content(digests, layer, self.shape.row_words)

    def forget(self, places: torch.Tensor) -> None:
        """Poison blocks of a finished request."""
        for words in self._words:
            words[:, places] = self._poison

    def faults(self, places: torch.Tensor, digests: torch.Tensor, retrieved: int) -> list[Fault]:
        """Compare the whole cache with what it must hold: content in the first `retrieved` blocks
        of the prompt, poison in all others.
        """
        found = []
        for layer, words in enumerate(self._words):
            want = torch.full_like(words, self._poison)
            want[:, places[:retrieved]] = content(digests[:retrieved], layer, self.shape.row_words)
            if not torch.equal(words, want):
                found.append(
                    self._fault(
                        layer, words.view(torch.uint8) != want.view(torch.uint8), places, retrieved
                    )
                )
        return found

    def _fault(
        self, layer: int, differs: torch.Tensor, places: torch.Tensor, retrieved: int
    ) -> Fault:
        """The fault of a layer. differs: for each byte, (2, blocks, bytes of a block), whether it
        is wrong.
        """
        blocks = differs.any(2).any(0)
        rows = blocks[places].nonzero().flatten().tolist()
        block = int(places[rows[0]]) if rows else int(blocks.nonzero()[0])
        row = differs[:, block].any(0)
        token = (
            rows[0] * self.shape.block_size
            + int(row.nonzero()[0]) * self.shape.block_size // len(row)
            if rows
            else -1
        )
        return Fault(
            "wrong" if rows and rows[0] < retrieved else "stray",
            layer,
            block,
            token,
            int(differs.sum()),
        )
