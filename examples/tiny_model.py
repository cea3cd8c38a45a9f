"""A tiny Llama with generated weights, for trying vLLM on a CPU without a download.

    python examples/tiny_model.py FOLDER

Writes config.json and model.safetensors, 6 MB. It has no tokenizer: start vLLM with
--skip-tokenizer-init, and send tokens from 0 to 1,023."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

try:
    from serving import write_model
except ModuleNotFoundError as absent:
    sys.exit(
        f"{Path(sys.argv[0]).name}: this Python has no {absent.name}: pip install "
        "'/path/to/vcache[engine]'"
    )

if __name__ == "__main__":
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("folder", type=Path, metavar="FOLDER")
    print(write_model(options.parse_args().folder, tiny=True))
