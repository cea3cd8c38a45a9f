"""Writes docs/demo.svg: what a terminal of 80 columns shows of `vcache demo`, run here. From a
checkout.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "demo.svg"
SETTINGS = {"COLUMNS": "80", "FORCE_COLOR": "1", "PATH": "/usr/bin:/bin"}


def main() -> None:
    command = [sys.executable, "-m", "vcache_backend.cli", "demo"]
    ran = subprocess.run(
        command,
        env=SETTINGS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=True,
    )
    terminal = Console(
        record=True, width=80, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    terminal.print(Text.assemble(("$ ", "dim"), ("vcache demo", "bold")))
    terminal.print(Text.from_ansi(ran.stdout.rstrip()))
    # Without the fonts that a reader's browser would fetch from elsewhere.
    picture = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    terminal.save_svg(str(PICTURE), title="vcache demo", code_format=picture, unique_id="demo")


if __name__ == "__main__":
    main()
