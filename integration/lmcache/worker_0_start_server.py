"""What `runtime_plugin_locations` names: LMCache runs this file beside its worker, and it hands over to `start_server`.

The file's name is for LMCache, which reads ROLE_WORKERID_NAME in it and skips what is not for the process it is in: of an instance's
processes only worker 0 runs it. LMCache takes the first `python` on PATH, which need not be the one vLLM runs under, so the
interpreter of the environment that this file is installed in comes first. Standard library only, for the same reason.
"""

from __future__ import annotations

import os
import re
import sys


def main() -> None:
    """Become `python -m vcache_backend.integration.lmcache.start_server`."""
    installed = re.match(r"(.*)/lib(?:64)?/python([\d.]+)/", os.path.abspath(__file__))
    python = f"{installed[1]}/bin/python{installed[2]}" if installed else ""
    if not os.access(python, os.X_OK):
        python = sys.executable
    os.execv(python, [python, "-P", "-m", "vcache_backend.integration.lmcache.start_server"])


if __name__ == "__main__":
    main()
