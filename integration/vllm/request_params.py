"""What a request asks of the connector in its own `kv_transfer_params`, under `vcache`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

NAME = "vcache"


class RequestParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """load, store: whether it takes chunks from the pool, and leaves its own there. announced: another instance computes this
    prompt now; wait for its chunks up to `wait_seconds` (None: `connector.wait_seconds`). consume_once: remove what was loaded."""

    load: bool = True
    store: bool = True
    announced: bool = False
    consume_once: bool | None = None
    wait_seconds: Annotated[float, msgspec.Meta(ge=0, le=600)] | None = None


NOTHING = RequestParams(load=False, store=False)
DEFAULT = RequestParams()


def read(params: Mapping[str, Any] | None) -> RequestParams:
    """The wishes in a request's `kv_transfer_params`. ValueError, which names the key, for what is unknown or impossible."""
    found = (params or {}).get(NAME)
    if found is None:
        return DEFAULT
    try:
        return msgspec.convert(found, RequestParams)
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_transfer_params: {NAME}: {error}") from error
