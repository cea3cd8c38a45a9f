"""Says, once a minute, that a `kv_consumer` computes its prompts: nobody has their KV, or nobody
can be asked."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from time import monotonic

from vcache_backend.errors import VCacheError
from vcache_backend.transfer.outbox import at_once

from .instance import InstanceContext
from .requests import Tracked
from .telemetry.stats import Meter

log = logging.getLogger("vllm.vcache")


class Unserved:
    """The prompts of a `kv_consumer` that it has computed itself. Runs in the scheduler's thread,
    except `_say`, and never waits."""

    def __init__(self, context: InstanceContext, meter: Meter) -> None:
        self._context, self._meter = context, meter
        self._due = 0.0
        self._prompts = self._tokens = self._served = 0
        """Since the last time that it was, or could have been, said."""

    def began(self, tracked: Tracked, computed: int) -> None:
        """Note that a request begins behind so many computed tokens."""
        missing = tracked.request.num_prompt_tokens - computed
        if tracked.supplied > tracked.local:
            self._served += 1
        elif missing > self._context.chunk_size and tracked.params.load:
            self._meter.count("computed_prompts", 1)
            self._prompts, self._tokens = self._prompts + 1, self._tokens + missing
            if (now := monotonic()) >= self._due:
                what = f"the last {self._prompts} prompts ({self._tokens:,} tokens)"
                if not self._served and (outbox := self._context.outbox) is not None:
                    outbox.after(at_once, lambda: self._say(what))
                self._due = now + 60.0
                self._prompts = self._tokens = self._served = 0

    def _say(self, what: str) -> None:
        """Runs in the outbox's thread."""
        client, own = self._context.client, self._context.publications
        assert client is not None
        why = client.trouble
        with suppress(VCacheError):
            others = sum(
                one.id != own.instance.hex() if own is not None else one.pid != os.getpid()
                for one in client.stats().instances
                if one.namespace == self._context.prefix.hex()
            )
            why = (
                f"none of the {others} instances that share KV with this one had them: have one "
                'compute each prompt, and announce it here ("announced")'
                if others
                else "no other instance shares KV with this one: start one with kv_role "
                "kv_producer or kv_both, the same model and the same settings"
            )
        log.warning("vcache: kv_consumer computes: nobody had %s: %s", what, why)
        with suppress(VCacheError):
            client.report("warn", f"kv_consumer (pid {os.getpid()}) computes its prompts: {why}")
