"""Which of pytest's processes runs which files of tests, with pytest-xdist."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling


class Schedule(LoadFileScheduling):  # type: ignore[misc]
    """Gives out whole files, in their order. The first process begins with the files that it alone
    has.
    """

    def schedule(self) -> None:
        """Called once all processes have said which tests they have, and again if one has ended
        early.
        """
        if self.collection is None:
            collections = sorted(self.registered_collections.values(), key=len)
            self.collection = collections[-1]
            self._of_all = set(map(self._split_scope, collections[0]))
            for test in self.collection:
                self.workqueue.setdefault(self._split_scope(test), {})[test] = False
        for node in self.nodes:
            self._reschedule(node)

    def add_node_collection(self, node: Any, collection: Any) -> None:
        """Not all have the same."""
        self.registered_collections[node] = list(collection)

    def _reschedule(self, node: Any) -> None:
        """Give the process files until it knows the next test beside those it runs."""
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 3:
            if node not in self.registered_collections:
                return  # It still collects. `schedule` comes again.
            has = set(map(self._split_scope, self.registered_collections[node]))
            files = [file for file in self.workqueue if file in has]
            if not files:
                node.shutdown()
                return
            alone = [file for file in files if file not in self._of_all]
            self.workqueue.move_to_end((alone or files)[0], last=False)
            self._assign_work_unit(node)
