"""LMCache's chunks on their way between the KV cache and its server's memory: through the GPU's
memory.

On a GPU LMCache's kernel for `engine_driven` mode would reach for host memory with all
multiprocessors, which wait for it: a step beside it stands still. Here it reaches for a few chunks
in the GPU's memory, and the copy engine, which holds up nobody, copies between these and the
host's."""

from __future__ import annotations

import functools
import inspect
import logging
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .. import hooks

log = logging.getLogger("vllm.vcache")

Found = tuple[list[torch.Tensor], object, Any]
"""KV caches, where they are and what else was told of them, and what LMCache made of it."""
MOST_STAGED = 4
"""As many chunks as LMCache's kernel takes at once. It leaves out tokens of the first so many
alone, so that it must not get more."""


class Staged(torch.Tensor):
    """A chunk in the GPU's memory, which LMCache's kernel may use as it may pinned host memory:
    LMCache asks for that."""

    def is_pinned(self, device: Any = None) -> bool:
        return True


@functools.cache
def warn_once(line: str) -> None:
    log.warning(line)


def staged(
    chunks: list[Any], caches: Mapping[str, Any]
) -> Iterator[tuple[int, list[Any], list[Any]]]:
    """Divide chunks of one shape in host memory into parts. For each part: the number of its first
    chunk, its chunks, and room for them on the GPU of the KV caches, the same room for each part.
    The caller copies between the two, on one stream. If the GPU has no memory left, each part is
    its own room."""
    device = next(iter(caches.values())).device
    few, room = chunks[:MOST_STAGED], None
    try:
        room = [torch.empty_like(chunk, device=device).as_subclass(Staged) for chunk in few]
    except torch.OutOfMemoryError:
        size = sum(chunk.nbytes for chunk in few) >> 20
        how = "lower --gpu-memory-utilization"
        warn_once(f"{size} MiB not free: LMCache's copies hold up vLLM's steps ({how})")
    for first in range(0, len(chunks), MOST_STAGED):
        part = chunks[first : first + MOST_STAGED]
        yield first, part, part if room is None else room[: len(part)]


def stage_stores(module: Any) -> None:
    """Have LMCache's stores go through the GPU's memory, one at a time. module: LMCache's
    `async_engine_driven`, which runs them in threads, on one stream. Raises hooks.Changed."""

    def gathers(theirs: Callable[..., Any]) -> Callable[..., Any]:
        names, alone = inspect.signature(theirs), threading.Lock()

        def gather(*args: Any, **kwargs: Any) -> Any:
            given = names.bind(*args, **kwargs).arguments
            out, wanted = given.get("out"), given.get("chunk_indices")
            if wanted is None:
                wanted = range(len(given["block_ids"]) // given["blocks_per_chunk"])
            if out is None or len(out) < len(wanted):
                return theirs(*args, **kwargs)  # It makes them itself, or raises.
            out = out[: len(wanted)]
            with alone:
                fill(out, wanted, given)
            return out

        def fill(out: list[Any], wanted: Sequence[int], given: dict[str, Any]) -> None:
            for first, part, there in staged(out, given["kv_caches"]):
                these = list(wanted[first : first + len(part)])
                theirs(**given | {"out": there, "chunk_indices": these})
                for source, target in zip(there, part, strict=True):
                    target.copy_(source, non_blocking=True)

        return gather

    taken = "kv_caches block_ids blocks_per_chunk out chunk_indices"
    hooks.replace(module, "gather_paged_kv_to_cpu", gathers, taken)


def keep_format(module: Any) -> Callable[[], None]:
    """Have LMCache look at the KV caches once. For every few chunks it looks at each layer again,
    in turns with vLLM's thread, which waits for Python's lock meanwhile. module: LMCache's
    `gpu_connector.utils`. Returns what forgets the KV caches, whose memory is held till then.
    Raises hooks.Changed."""
    last: list[Found] = []

    def keeps(theirs: Callable[..., Any]) -> Callable[..., Any]:
        def normalize(kv_caches: Any, *args: Any, **kwargs: Any) -> Any:
            if type(kv_caches) is not list or not all(map(torch.is_tensor, kv_caches)):
                return theirs(kv_caches, *args, **kwargs)
            told = [cache.data_ptr() for cache in kv_caches], args, kwargs
            for caches, before, found in last:
                # Another tensor may begin at the same address.
                if told == before and all(map(operator.is_, kv_caches, caches)):
                    return found
            found = theirs(kv_caches, *args, **kwargs)
            last[:] = [([*kv_caches], told, found)]
            return found

        return normalize

    hooks.replace(module, "normalize_kv_and_discover_format", keeps, "kv_caches")
    return last.clear
