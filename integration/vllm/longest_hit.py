"""Which of several connectors has the longest hit of a request, and how long a request waits for a
connector that has not answered."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

from vllm.v1.request import RequestStatus

log = logging.getLogger("vllm.vcache")

PATIENCE_SECONDS = 10.0
"""How long a request waits for the answer of another connector that might have a longer hit."""
LOOKUP_SECONDS = 0.002
"""How long one step of the scheduler waits in all for LMCache's look-ups of new requests: they take
one to three milliseconds, and meanwhile the GPU computes the step before. Asked once a step,
LMCache 0.5.6 answers with the third, behind two that may compute long prompts."""

Matched = tuple[int | None, bool]
"""As vLLM wants it: tokens beyond those computed, or None: not known yet; whether they are loaded
beside the steps."""


@dataclass
class Hits:
    """What connectors, by number, have said of a request."""

    chosen: int | None = None
    """The connector with the longest hit."""
    waits: bool = False
    """It loads beside the steps."""
    local: int = 0
    """Tokens that vLLM had itself when it asked."""
    late: set[int] = field(default_factory=set)
    """Connectors that have not answered, though the request goes on."""
    since: float = 0.0
    """When the request began to wait for a late answer (time.monotonic)."""
    longer: set[int] = field(default_factory=set)
    """Connectors that have a longer hit, and have not yet said from which token."""
    loader: int | None = None
    """The connector of the last load."""
    failed: set[int] = field(default_factory=set)
    """Other connectors of which a load of this request has failed. Their hits count no more: their
    worker may be out of use, and their scheduler's half may find the same again and again."""

    def allocated(self, loader: int | None) -> None:
        """The request has its blocks. loader: the connector that fills them, if one does."""
        self.since, self.longer = 0.0, set()
        self.loader = self.loader if loader is None else loader


@dataclass
class LongestHit:
    """In the scheduler's thread."""

    connectors: Sequence[Any]
    """Ours first."""
    block: int
    """Its tokens."""
    spent: float = 0.0
    """Of `LOOKUP_SECONDS`. The caller sets it to 0 with each step."""

    def of(self, hits: Hits, request: Any, computed: int) -> Matched:
        """Ask every connector; what vLLM is to hear. A hit counts if it is longer than those of the
        connectors before. computed: tokens that vLLM has.

        A connector that has not answered is waited for only while it could have a longer hit: not
        once another one has the whole prompt, which would lose time for nothing; and not longer
        than `PATIENCE_SECONDS`, since a server may be hung. Ours has its own deadlines."""
        best, hits.chosen, hits.waits, hits.local = 0, None, False, computed
        hits.late = set()
        for number in range(len(self.connectors)):
            tokens, waits = self._longer(hits, number, request, best)
            if tokens is None:
                hits.late.add(number)
            elif tokens > best and number not in hits.failed:
                best, hits.chosen, hits.waits = tokens, number, waits
        if hits.late and not self._whole(request, computed + best) and self._waits(hits):
            return None, False
        return best, hits.waits

    def _longer(self, hits: Hits, number: int, request: Any, best: int) -> Matched:
        """A connector's hit, if it is longer than the best one."""
        found = hits.local + (0 if number in hits.longer else best)
        tokens, waits = self._ask(hits, number, request, found)
        # Others send look-ups with the step's end, or sleep at each question.
        within = getattr(self.connectors[number], "tracks", False)
        first = not (hits.late or hits.since or self._whole(request, found))
        if tokens is None and within and first:
            tokens, waits = self._ask_again(hits, number, request, found)
        if tokens and found > hits.local:
            # Longer than the best: now with the tokens from which it has to load.
            tokens, waits = self._ask(hits, number, request, hits.local)
            if tokens is None:
                hits.longer.add(number)
        return tokens, waits

    def _ask(self, hits: Hits, number: int, request: Any, computed: int) -> Matched:
        """A connector's answer. A request whose load has failed begins anew, with other blocks: for
        a connector that notes blocks it is as if it was preempted."""
        child, status = self.connectors[number], request.status
        if getattr(child, "tracks", False) and status != RequestStatus.PREEMPTED:
            if hits.loader is None:
                child.forget_answers(request.request_id)
            elif hits.loader != number or not child.ends_failed_loads(request.request_id):
                request.status = RequestStatus.PREEMPTED
        try:
            return child.get_num_new_matched_tokens(request, computed)  # type: ignore[no-any-return]
        finally:
            request.status = status

    def _ask_again(self, hits: Hits, number: int, request: Any, computed: int) -> Matched:
        """A connector's answer, if it comes within what is left of `LOOKUP_SECONDS`."""
        answer: Matched = None, False
        began = now = monotonic()
        while answer[0] is None and now < began + LOOKUP_SECONDS - self.spent:
            sleep(0.0002)
            answer = self._ask(hits, number, request, computed)
            now = monotonic()
        self.spent += now - began
        return answer

    def _whole(self, request: Any, hit: int) -> bool:
        return hit + self.block >= request.num_tokens  # type: ignore[no-any-return]

    def _waits(self, hits: Hits) -> bool:
        hits.since = hits.since or monotonic()
        if 0 in hits.late or monotonic() < hits.since + PATIENCE_SECONDS:
            return True
        late = ", ".join(self.connectors[number].name for number in hits.late)
        log.warning("a request waited %.0f s for the look-up of %s", PATIENCE_SECONDS, late)
        return False
