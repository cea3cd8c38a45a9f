"""For `PYTHONPATH`, where Python finds it: what asks for a new Python is forked. On a CPU vLLM's
engine would import all again.
"""

import multiprocessing

_context = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: _context("fork" if method == "spawn" else method)  # type: ignore[assignment]
