"""The common properties of instances that share (`Layout`), and their digest, the namespace."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import msgspec

from vcache_backend.protocol.messages import NAMESPACE_BYTES

if TYPE_CHECKING:
    from torch import Tensor


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """All properties that change a chunk's bytes, or the right to read them. Two instances share if
    and only if all fields are equal.

    block_size, chunk_size: in tokens. kv_layout: the order of a layer's KV within a block,
    `PagedKV.name`. extra: an integration's additions (LoRA, quantisation, the hash algorithm and
    seed of foreign block hashes)."""

    model: str
    revision: str = ""
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    kv_layout: str
    chunk_size: int = 256
    rope: str = ""
    tp_size: int = 1
    pp_size: int = 1
    pp_rank: int = 0
    hash_algorithm: str = "blake2b-128"
    extra: dict[str, str] = {}

    def __post_init__(self) -> None:
        """Raise ValueError for values that no KV cache can have."""
        for name, kind in get_type_hints(Layout).items():
            value, least = getattr(self, name), int(name not in ("pp_rank", "kv_heads", "head_dim"))
            wanted = "a text" if kind is str else f"a whole number of {least} or more"
            right = isinstance(value, kind) if kind in (int, str) else True
            if not right or (kind is int and value < least):
                raise ValueError(f"Layout({name}={value!r}): expected {wanted}")
        if not all(isinstance(part, str) for pair in self.extra.items() for part in pair):
            raise ValueError(f"Layout(extra={self.extra!r}): expected texts only")
        if self.chunk_size % self.block_size:
            wanted = f"a multiple of block_size {self.block_size}"
            raise ValueError(f"Layout(chunk_size={self.chunk_size}): expected {wanted}")

    @classmethod
    def of(
        cls,
        kvcaches: Sequence[Tensor] | Mapping[str, Tensor],
        block_size: int,
        *,
        model: str,
        axes: str | None = None,
        **more: Any,
    ) -> Layout:
        """Make the layout of these tensors, one for each layer, with blocks of `block_size` tokens.

        axes: see `PagedKV.describe`; None: recognised from the shapes. more: fields that tensors do
        not show, such as `revision`, `tp_size`, `extra`. LayoutError if the arrangement is not
        recognised, ValueError for wrong values."""
        from vcache_backend.vram_pool.copies.geometry import PagedKV

        kv = PagedKV.describe(kvcaches, block_size, axes=axes)
        sizes = {axis: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)[. ]", kv.name)}
        tensors: dict[str, Any] = {"dtype": kv.dtype, "layers": kv.layers, "kv_layout": kv.name}
        tensors |= {"kv_heads": sizes.get("head", 1), "head_dim": sizes.get("dim", 1)}
        return cls(model=model, **(tensors | {"block_size": block_size} | more))

    def fields(self) -> dict[str, str]:
        """All fields as text, for the server and for people. `extra` appears as `extra.NAME`."""
        names = [name for name in self.__struct_fields__ if name != "extra"]
        plain = {name: str(getattr(self, name)) for name in names}
        return plain | {f"extra.{key}": value for key, value in sorted(self.extra.items())}

    def namespace(self) -> Namespace:
        """Make the namespace: the 32-byte BLAKE2b digest of `fields()`, sorted, as MessagePack."""
        canonical = msgspec.msgpack.encode(sorted(self.fields().items()))
        digest = hashlib.blake2b(canonical, digest_size=32, person=b"vcache-layout-1")
        return Namespace(digest.digest())


class Namespace(NamedTuple):
    """The digest of a layout. fingerprint: 32 bytes, the key of the token hash. prefix: the first 8
    bytes, the beginning of every chunk key."""

    fingerprint: bytes

    @property
    def prefix(self) -> bytes:
        return self.fingerprint[:NAMESPACE_BYTES]

    def __str__(self) -> str:
        return self.prefix.hex()
