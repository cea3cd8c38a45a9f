"""Which of pytest's processes runs which file of tests (pytest-xdist)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadFileScheduling

_IMPORTS_VLLM = re.compile(r'^ *pytest\.importorskip\(\s*"vllm\.', re.M)
FIRST = "gw0"
THIS = os.environ.get("PYTEST_XDIST_WORKER", FIRST)
"""The name of this process."""


def of_another_process(path: Path) -> bool:
    """Whether another process has this file of tests. Vllm takes 12 s of processor time to import,
    so the first process alone has all files that import it.
    """
    return THIS != FIRST and _IMPORTS_VLLM.search(path.read_text()) is not None


class Schedule(LoadFileScheduling):  # type: ignore[misc]
    """Gives out whole files, in their order. The first process begins with those that it alone
    has.
    """

    def schedule(self) -> None:
        assert self.collection_is_completed
        if self.collection is None:
            self._shared, *_, self.collection = sorted(
                map(list, self.registered_collections.values()), key=len
            ) * 2
            for test in self.collection:
                self.workqueue.setdefault(self._split_scope(test), {})[test] = False
            self._shared = {self._split_scope(test) for test in self._shared}
        for node in self.nodes:
            self._reschedule(node)

    def _reschedule(self, node: Any) -> None:
        """A process must know its next test before the present one ends."""
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 3:
            has = {self._split_scope(test) for test in self.registered_collections[node]}
            files = [file for file in self.workqueue if file in has]
            if not files:
                node.shutdown()
                return
            alone = [file for file in files if file not in self._shared]
            self.workqueue.move_to_end((alone or files)[0], last=False)
            self._assign_work_unit(node)
