"""A request's own settings for the connector: `vcache` in its `kv_transfer_params`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

NAME = "vcache"


class RequestParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """load, store: whether the request may load chunks, and share its own. announced: another
    instance computes this prompt now: wait for its chunks, up to `wait_seconds` (None:
    `connector.wait_seconds`)."""

    load: bool = True
    store: bool = True
    announced: bool = False
    wait_seconds: Annotated[float, msgspec.Meta(ge=0, le=600)] | None = None


NOTHING = RequestParams(load=False, store=False)
DEFAULT = RequestParams()


def read(params: Mapping[str, Any] | None) -> RequestParams:
    """The settings in a request's `kv_transfer_params`. ValueError, which names the key, if one is
    unknown or impossible.
    """
    found = (params or {}).get(NAME)
    if found is None:
        return DEFAULT
    try:
        return msgspec.convert(found, RequestParams)
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_transfer_params: {NAME}: {error}") from error
