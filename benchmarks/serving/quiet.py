"""`python -m benchmarks.serving.quiet MODULE ARGUMENT...`: the module, with all it prints on standard error.

`vllm.process.Child` keeps a child's standard output for answers, and a server gives none.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    os.dup2(2, 1)
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[1:]])
