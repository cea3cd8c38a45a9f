"""Who may share a cached prefix with whom, said in a request's own `kv_transfer_params`.

LMCache's key knows neither vLLM's `cache_salt` nor the LoRA adapter. It does take part of its key from a request's tags
(`lmcache.tag.NAME` in `kv_transfer_params`), so the scheduler's hook gives every request the tag `vcache`: its scope. Requests
with different scopes never share; the worker refuses keys without one. Pure functions: nothing of vLLM or LMCache is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

TAG_PREFIX = "lmcache.tag."
TAG_NAME = "vcache"
TAG = TAG_PREFIX + TAG_NAME
SKIP_SAVE = "lmcache.skip_save"
PLAIN = "-"
"""The scope of a request with neither salt nor adapter."""

REFUSED = "vcache.uncached"
"""Beside `SKIP_SAVE`: the request is not looked up either, however often vLLM schedules it. Users may set it too."""

_PARAMS = "kv_transfer_params"
_PLAIN_TYPES = (str, int, float, bool, type(None))


def scope(salt: str | None, adapter: tuple[str, ...] | None) -> str:
    """The scope of a request: `-`, or the hex BLAKE2b-128 of its salt and its adapter (name, path, and what lies there).

    The digest never contains `@` or `%`, with which LMCache joins tags into strings, and survives JSON.
    """
    if salt is None and adapter is None:
        return PLAIN
    digest = blake2b(digest_size=16, person=b"vcache-scope-1")
    for part in (salt, *(adapter or (None, None))):
        data = b"" if part is None else part.encode("utf-8", "surrogatepass")
        digest.update(b"\0" if part is None else b"\1" + len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def has_own_tag(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether the user tells requests apart himself, by a tag that is not ours."""
    return any(name.startswith(TAG_PREFIX) and name != TAG for name in _params(extra_args))


def tagged(extra_args: Mapping[str, Any] | None, value: str) -> dict[str, Any]:
    """A copy of `SamplingParams.extra_args` with our tag first, whatever the user wrote under that name.

    First, because LMCache joins tags in this order for the keys of its other tiers: no tag of a user's can then imitate ours.
    ValueError for a tag that LMCache could not hash.
    """
    params = _params(extra_args)
    unfit = [name for name, what in params.items() if name.startswith(TAG_PREFIX) and not isinstance(what, _PLAIN_TYPES)]
    if unfit:
        raise ValueError(f"{unfit[0]} in kv_transfer_params is a {type(params[unfit[0]]).__name__}; a tag is text or a number")
    return {**(extra_args or {}), _PARAMS: {TAG: value, **{name: what for name, what in params.items() if name != TAG}}}


def is_refused(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether `uncached` has been here."""
    return bool(_params(extra_args).get(REFUSED, False))


def uncached(extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of `extra_args` that tells LMCache to store nothing of the request; tags, ours included, are taken out."""
    try:
        params = _params(extra_args)
    except ValueError:
        params = {}
    kept = {name: what for name, what in params.items() if not name.startswith(TAG_PREFIX)}
    return {**(extra_args or {}), _PARAMS: {**kept, SKIP_SAVE: True, REFUSED: True}}


def _params(extra_args: Mapping[str, Any] | None) -> Mapping[str, Any]:
    params = (extra_args or {}).get(_PARAMS) or {}
    if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
        raise ValueError(f"kv_transfer_params is a {type(params).__name__}, not a mapping of names")
    return params
