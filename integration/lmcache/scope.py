"""Scopes: requests share cached prefixes only within a scope, named by a tag in
`kv_transfer_params`.

LMCache's key contains neither vLLM's `cache_salt` nor the LoRA adapter, but a request's tags
(`lmcache.tag.NAME` in `kv_transfer_params`). So the scheduler's hook gives every request the tag
`vcache`, the request's scope, and the worker refuses keys without this tag. Imports neither vLLM
nor LMCache."""

from __future__ import annotations

import copy
import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from ..vllm.scheduler.adapters import Adapters
from .boundary import SCHEDULER, THEIRS

if TYPE_CHECKING:
    from vcache_backend.transfer.keys import Tags

    from ..doubts import Doubts

TAG_PREFIX = "lmcache.tag."
TAG_NAME = "vcache"
TAG = TAG_PREFIX + TAG_NAME
SKIP_SAVE = "lmcache.skip_save"
PLAIN = "-"
"""The scope of a request with neither salt nor adapter."""

REFUSED = "vcache.uncached"
"""Set beside `SKIP_SAVE`: never look the request up. Users may set it, too."""

_PARAMS = "kv_transfer_params"
log = logging.getLogger(__name__)
_PLAIN_TYPES = (str, int, float, bool, type(None))


def scope(salt: str | None, adapter: tuple[str, ...] | None) -> str:
    """Make a request's scope: `-`, or the hex BLAKE2b-128 of salt and adapter.

    LMCache joins tags into strings with `@` and `%`, which hex digits never contain."""
    if salt is None and adapter is None:
        return PLAIN
    digest = blake2b(digest_size=16, person=b"vcache-scope-1")
    for part in (salt, *(adapter or (None, None))):
        data = b"" if part is None else part.encode("utf-8", "surrogatepass")
        digest.update(b"\0" if part is None else b"\1" + len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def scoped(tags: Tags) -> bool:
    """Whether a key has our tag. If not, the scheduler has not loaded our plugin."""
    return any(name == TAG_NAME for name, _ in tags or ())


def tags_of(configs: Mapping[str, Any] | None) -> Tags:
    """The tags that LMCache writes into the keys of a request with these `request_configs`."""
    return tuple(
        (name.removeprefix(TAG_PREFIX), value)
        for name, value in (configs or {}).items()
        if name.startswith(TAG_PREFIX)
    )


def has_own_tag(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether the user has set an LMCache tag besides ours to tell requests apart."""
    return any(name.startswith(TAG_PREFIX) and name != TAG for name in _params(extra_args))


def tagged(extra_args: Mapping[str, Any] | None, value: str) -> dict[str, Any]:
    """Copy `SamplingParams.extra_args` with our tag, which overrides a user's tag of this name.

    ValueError, in one short line for the log, if LMCache cannot hash a tag's value."""
    params = _params(extra_args)
    for name, setting in params.items():
        if name.startswith(TAG_PREFIX) and not isinstance(setting, _PLAIN_TYPES):
            kind = type(setting).__name__
            said = f"{name!r:.80} in kv_transfer_params is a {kind}; a tag is text or a number"
            raise ValueError(said)
    # LMCache's own keys depend on the order of tags: our tag comes first.
    return {**(extra_args or {}), _PARAMS: {TAG: value, **params} | {TAG: value}}


def is_refused(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether `uncached` or the user has excluded the request from caching."""
    return bool(_params(extra_args).get(REFUSED, False))


def uncached(extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Copy `extra_args` without tags, and with settings that store nothing of the request."""
    try:
        params = _params(extra_args)
    except ValueError:
        params = {}
    kept = {name: setting for name, setting in params.items() if not name.startswith(TAG_PREFIX)}
    return {**(extra_args or {}), _PARAMS: {**kept, SKIP_SAVE: True, REFUSED: True}}


def _params(extra_args: Mapping[str, Any] | None) -> Mapping[str, Any]:
    params = (extra_args or {}).get(_PARAMS) or {}
    if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
        raise ValueError(f"kv_transfer_params is a {type(params).__name__}, not a mapping of names")
    return params


def give_scope(request: Any, adapters: Adapters) -> bool:
    """Write a vLLM request's scope into its sampling parameters. Returns whether the request may be
    cached. Idempotent.

    Not cached: a request without sampling parameters (pooling); with prompt embeddings (LMCache's
    key has only token ids); with a LoRA adapter whose weights cannot be identified (see
    `Adapters`), unless the user has set a tag; a request that was refused before. The parameters
    are copied, since other requests may hold the same object."""
    params = request.sampling_params
    if params is None:
        return False
    lora, extra = request.lora_request, params.extra_args
    embedded = getattr(request, "prompt_embeds", None) is not None
    content = adapters.content(lora) if lora is not None else ""
    nameless = lora is not None and not content and not has_own_tag(extra)
    if is_refused(extra) or embedded or nameless:
        _replace(request, uncached)
        return False
    adapter = None if lora is None else (lora.lora_name, lora.lora_path, content)
    value = scope(request.cache_salt, adapter)
    _replace(request, functools.partial(tagged, value=value))
    return True


def _replace(request: Any, rewrite: Callable[[Mapping[str, Any] | None], dict[str, Any]]) -> None:
    if request.sampling_params is not None:
        params = copy.copy(request.sampling_params)
        params.extra_args = rewrite(params.extra_args)
        request.sampling_params = params


class Scheduler:
    """Our parts of calls of LMCache's adapter in vLLM's scheduler: gives every request a scope.
    Runs in the scheduler's thread."""

    def __init__(self, adapter: Any, doubts: Doubts) -> None:
        self._adapter, self._doubts = adapter, doubts
        self._load_spec = importlib.import_module(type(adapter).__module__).LoadSpec
        adapter.get_num_new_matched_tokens = SCHEDULER.instead(
            adapter.get_num_new_matched_tokens, self.tag, off=self.miss, nothing=0
        )
        adapter.request_finished = SCHEDULER.around(adapter.request_finished, self.forget)
        self._adapters = Adapters()
        self._warned = False

    def tag(self, request: Any, num_computed_tokens: int) -> Any:
        """Tag the request, before the adapter looks it up. 0, without a look-up, if the request
        must not be cached or must compute every token (for prompt log probabilities)."""
        try:
            cacheable = give_scope(request, self._adapters)
        except ValueError as error:
            cacheable = False
            self._refuse_to_save(request, error)
        computes = getattr(request, "skip_reading_prefix_cache", False) or self._doubts.everything
        wanted = cacheable and not computes
        if wanted or self._adapter.lookup_client is None:
            return THEIRS
        return self.miss(request, num_computed_tokens)

    def miss(self, request: Any, num_computed_tokens: int) -> int:
        """Answer that nothing was found."""
        # The adapter needs a load spec for every scheduled request (after a preemption it
        # asserts this).
        self._adapter.load_specs[request.request_id] = self._load_spec(
            vllm_cached_tokens=num_computed_tokens, lmcache_cached_tokens=0, can_load=False
        )
        return 0

    def forget(self, request: Any, _: list[int]) -> None:
        """Forget the look-up of a request that has not run. The name may come again, if vLLM does
        not make names unique (VLLM_DISABLE_REQUEST_ID_RANDOMIZATION)."""
        if self._adapter.lookup_client is not None:
            self._adapter.lookup_client.clear_lookup_status(request.request_id)

    def _refuse_to_save(self, request: Any, error: ValueError) -> None:
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        name, kind = request.request_id, type(error).__name__
        log.log(level, "vcache: request %s is not cached (%s: %s)", name, kind, error)
        _replace(request, uncached)
