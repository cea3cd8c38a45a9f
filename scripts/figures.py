"""Makes the pictures and tables of docs/benchmarks.md from result files.

Pictures go to docs/figures/, tables behind the marks in the page. A test compares both with the
files, and what other pages say with `claims`, so each figure is that of a file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "vllm" / "prefill_decode.md"
PICTURES = ROOT / "docs" / "figures"
RESULTS = ROOT / "benchmarks" / "results"
GREY, DARK, AMBER, BLUE, NAVY = "#c3c9d0", "#6e7781", "#d39a4a", "#2f7bc4", "#123f75"
WIDTH, NAMES, TALL = 860, 190, 18
"""Pixels: of a picture, of the names at its left, and of a bar with the space below it."""


@cache
def rows(file: str, commit: str) -> dict[str, Any]:
    """The rows of all runs of a commit by their case; a later run replaces an earlier one."""
    runs = json.loads((RESULTS / f"{file}.json").read_text())
    found = {row["case"]: row for run in runs if run["commit"] == commit for row in run["rows"]}
    assert found, (file, commit)
    return found


# ---- pictures


class Bar(NamedTuple):
    name: str
    value: float
    colour: str


Group = tuple[str, Sequence[Bar]]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def picture(
    said: str, panels: Sequence[tuple[str, Sequence[Group]]], together: bool = False
) -> str:
    """Bars in groups, side by side for each panel. Within a group the longest bar fills the panel.

    said: what the picture shows, for those who cannot see it. together: all groups have one
    scale."""
    width = (WIDTH - NAMES) // len(panels)
    heights = [26 + TALL * len(bars) for _, bars in panels[0][1]]
    tall = 34 + sum(heights)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall}" role="img" '
        f'aria-label="{escape(said)}" fill="#1f2328" font-size="12" '
        'font-family="-apple-system,Segoe UI,Helvetica,Arial,sans-serif">'
        f'<rect width="{WIDTH}" height="{tall}" fill="#fff"/>'
    ]

    def text(x: int, y: int, what: str, more: str = "") -> None:
        parts.append(f'<text x="{x}" y="{y}"{more}>{escape(what)}</text>')

    bold, right = ' font-weight="600"', ' text-anchor="end"'
    for column, (title, groups) in enumerate(panels):
        left, top = NAMES + column * width, 34
        text(left, 20, title, bold)
        for (name, bars), height in zip(groups, heights, strict=True):
            if not column:
                text(8, top + 12, name, bold)
            scaled = [bar for group in groups for bar in group[1]] if together else bars
            longest = max(bar.value for bar in scaled)
            for index, (label, value, colour) in enumerate(bars):
                y = top + 18 + index * TALL
                size = max(1, round(value / longest * (width - 64)))
                box = f'x="{left}" y="{y}" width="{size}" height="14" rx="2" fill="{colour}"'
                parts.append(f"<rect {box}/>")
                text(left + size + 5, y + 11, number(value))
                if not column:
                    text(NAMES - 8, y + 11, label, right)
            top += height
    return "\n".join([*parts, "</svg>\n"])


LENGTHS = ("1k", "4k", "16k", "32k")
MEASURES = {
    "requests_per_second": "requests/s",
    "ttft_p50": "median TTFT, ms",
    "ttft_p99": "p99 of TTFT, ms",
}
ARMS = {
    "vLLM, in turn": (("alone_turn",), GREY),
    "LMCache's server": (("mp_turn",), AMBER),
    "router": (("alone_cache_aware64", "alone_cache_aware16"), DARK),
    "vcache, in turn": (("inplace_turn",), BLUE),
    "vcache and router": (("inplace_cache_aware64", "inplace_cache_aware16"), NAVY),
}
"""Of several arms that a bar may show, the one with the best figure."""
RANK_ARMS = {"vLLM": (("alone_dp_turn",), GREY), "vcache": (("inplace_dp_turn",), BLUE)}
TWO = {
    "fork": ("two-servers", "3eedbfe9"),
    "cold": ("two-servers", "9612ea56"),
    "trace": ("two-servers", "3eedbfe9"),
    "prefix": ("two-servers", "3eedbfe9"),
    "chat": ("two-servers", "9612ea56"),
    "contention": ("contention", "7a313b48"),
}
FOUR = {
    "fork": ("four-servers", "b8547c01"),
    "trace": ("four-servers", "820aafcc"),
    "chat": ("four-servers", "f4151d0b"),
    "chat, less memory": ("four-servers", "decea747"),
    "prefix": ("four-servers", "820aafcc"),
    "hot": ("four-servers", "820aafcc"),
    "warm": ("four-servers", "b8547c01"),
}
RANKS = {
    "prefix, two ranks": ("ranks", "8f73c47"),
    "hot, two ranks": ("ranks", "8f73c47"),
    "chat, two ranks": ("ranks", "a2904af9"),
    "chat, two ranks, gpt-oss": ("ranks", "6892e4c1"),
    "prefix, four ranks": ("ranks", "7cf2a5da"),
    "hot, four ranks, H100s": ("ranks", "5a3c6805"),
    "chat, four ranks": ("ranks", "f4151d0b"),
    "chat, four ranks, gpt-oss": ("ranks", "decea747"),
    "prefix, four ranks, gpt-oss": ("ranks", "decea747"),
}


def workload_of(name: str) -> str:
    """As rows have it."""
    return "gpt_oss_20b_" * name.endswith("gpt-oss") + name.split(",")[0]


def served(said: str, lines: dict[str, tuple[str, str]], arms: Any) -> str:
    """What each arm did under each workload of `lines`."""

    def groups(measure: str) -> Iterator[Group]:
        for name, run in lines.items():
            workload, found = workload_of(name), rows(*run)
            bars = []
            for arm, (several, colour) in arms.items():
                cases = [f"vllm_serving_{one}_{workload}_{measure}" for one in several]
                values = [found[case]["value"] for case in cases if case in found]
                if values:
                    best: Callable[[list[float]], float] = (
                        max if measure == "requests_per_second" else min
                    )
                    bars.append(Bar(arm, best(values), colour))
            yield name, bars

    return picture(said, [(title, list(groups(measure))) for measure, title in MEASURES.items()])


def first_token() -> str:
    def panel(title: str, commit: str, side: str, name: str) -> tuple[str, list[Group]]:
        found = rows("ttft", commit)

        def bars(length: str) -> list[Bar]:
            shown = (
                ("computed", "recompute", GREY),
                (name, "vcache", BLUE),
                ("own cache", "prefix", DARK),
            )
            return [
                Bar(what, found[f"{side}_{case}_ms_{length}"]["value"], colour)
                for what, case, colour in shown
            ]

        return title, [(f"{length} tokens", bars(length)) for length in LENGTHS]

    return picture(
        "Time to first token of four prompts: computed, from another GPU, from the own cache",
        [
            panel("in place, ms", "9612ea56", "inplace", "other GPU"),
            panel("through a pool, H100s, ms", "9612ea56", "vllm", "other GPU"),
        ],
    )


COPIES = {
    "peer_retrieve_256MiB": "256 MiB of a pool on another GPU",
    "peer_retrieve_4MiB": "4 MiB of a pool on another GPU",
    "inplace_copy_256MiB": "256 MiB of another KV cache",
    "inplace_copy_3_owners": "768 MiB of three KV caches",
    "host_retrieve_256MiB": "256 MiB out of host memory",
    "host_store_256MiB": "256 MiB into host memory",
}


def copies() -> str:
    found = rows("copies", "7cf2a5da")
    groups = [
        (
            name,
            [
                Bar("vcache", found[case]["value"], BLUE),
                Bar("copy engine", found[case]["reference"], GREY),
            ],
        )
        for case, name in COPIES.items()
    ]
    return picture("Copies by vcache's kernel and by the copy engine", [("GB/s", groups)])


def misses() -> str:
    groups = []
    for name, place in ADDED.items():
        commit, case = place.split()
        row = rows("costs", commit)[case]
        bars = [Bar("with", row["value"], BLUE), Bar("without", row["reference"], GREY)]
        groups.append((f"{name}, {row['unit']}", bars))
    return picture("Instances with vcache and without", [("", groups)])


def wrong_answers() -> str:
    groups = []
    for name, place in FAILURES.items():
        commit, case = place.split()
        wrong, control = (
            rows("failures", commit)[case.format(what)] for what in ("wrong", "control_wrong")
        )
        bars = [Bar("vcache", wrong["value"], BLUE), Bar("control", control["value"], AMBER)]
        groups.append((name, bars))
    return picture("Wrong answers, and those of the control", [("wrong answers", groups)], True)


def pictures() -> dict[str, str]:
    return {
        "first-token.svg": first_token(),
        "two-servers.svg": served(
            "Two servers: requests/s and time to first token of each system", TWO, ARMS
        ),
        "four-servers.svg": served(
            "Four servers: requests/s and time to first token of each system", FOUR, ARMS
        ),
        "ranks.svg": served("Data parallel ranks with and without vcache", RANKS, RANK_ARMS),
        "misses.svg": misses(),
        "wrong-answers.svg": wrong_answers(),
        "copies.svg": copies(),
    }


# ---- tables


def table(head: str, lines: Sequence[Sequence[str]]) -> str:
    names = head.split("|")
    return (
        "\n".join(
            "| " + " | ".join(cells) + " |" for cells in (names, ["---"] * len(names), *lines)
        )
        + "\n"
    )


def cell(row: Any, value: float, form: str = "{:.3g}") -> str:
    """A figure, in bold if its row missed its limit."""
    text = form.format(value)
    return f"**{text}**" if row["ok"] is False else text


SIDES = {"inplace": "in place", "vllm": "through a pool", "lmcache": "through LMCache"}
EQUAL = {
    "full attention (Llama 3.1)": {
        "inplace": "f4151d0b",
        "vllm": "f4151d0b",
        "lmcache": "f4151d0b",
    },
    "the same, one H200, the latest": {
        "inplace": "2042341f",
        "vllm": "7c262837",
        "lmcache": "9695bb3f",
    },
    "the same, in place, out of its host pool": {"saved": "fbc437b7"},
    "the same, beside LMCache's server": {"both": "0b6dc209", "behind": "0b6dc209"},
    "fp8": {"inplace_fp8": "9a3182d1", "vllm_fp8": "f4151d0b"},
    "n-gram drafts": {"inplace_ngram": "9a3182d1", "vllm_ngram": "f4151d0b"},
    "EAGLE": {"inplace_head": "d1d4118", "vllm_head": "d1d4118"},
    "MLA": {"inplace_mla": "9a3182d1", "vllm_mla": "f4151d0b"},
    "MLA and indexer (DeepSeek V3.2)": {"inplace_sparse": "d1d4118", "vllm_sparse": "d1d4118"},
    "compressed MLA (DeepSeek V4)": {"inplace_v4": "9c539e28"},
    "windows (Gemma 3)": {"inplace_gemma3": "b451fbfe", "vllm_gemma3": "f4151d0b"},
    "windows (gpt-oss)": {"inplace_gpt_oss": "b451fbfe", "vllm_gptoss": "f4151d0b"},
    "states (Granite 4)": {"inplace_mamba2": "b451fbfe", "vllm_state_mamba2": "9a3182d1"},
    "short convolutions (LFM 2)": {"inplace_conv": "b451fbfe", "vllm_state_conv": "f153e5f9"},
    "states (Qwen3-Next)": {"inplace_gdn": "36181fe9", "vllm_state_gdn": "6df87a65"},
    "tensor parallel, two ranks": {"inplace_tp2": "3211d99", "vllm_tp2": "f4151d0b"},
    "pipeline parallel, two ranks": {"inplace_pp2": "1fdf8d4a", "vllm_pp2": "bc25377"},
}
"""The commit by the case, without what it measures."""
BESIDE = {"both": "inplace", "behind": "lmcache", "saved": "vllm"}
"""The column of a hit that `VCacheMultiConnector` has from vcache, or from LMCache; and of one that
an instance in place has out of a pool."""


def equality() -> str:
    lines = []
    for name, cases in EQUAL.items():
        cells = dict.fromkeys(SIDES, "")
        for case, commit in cases.items():
            side, line, variant = case.partition("_")
            found = rows("equality", commit)
            assert found[f"{side}_instances_agree{line}{variant}"]["value"] == 1, case
            every = [f"{start}_equal{line}{variant}" for start in (side, "groups")]
            hits = next(found[one] for one in every if one in found)
            assert hits["value"] == 1, case
            cells[BESIDE.get(side, side)] = str(hits["runs"])
        lines.append([name, *cells.values()])
    return table("|".join(["hits", *SIDES.values()]), lines)


def compared(lines: dict[str, tuple[str, str]], form: str, *ends: str) -> str:
    """vcache in turn beside the best arm without vcache; above 1 vcache is better."""
    shown = []
    for name, run in lines.items():
        start = "x4_" * ("four ranks" in name) + form.format(workload_of(name))
        found = [rows(*run).get(f"{start}_{end}") for end in ends]
        cells = ["" if row is None else cell(row, row["ratio"], "{:.3f}") for row in found]
        shown.append([name, *cells, run[1]])
    return table("|".join(["workload", *(TITLES[end] for end in ends), "commit"]), shown)


TITLES = {
    "throughput": "requests/s",
    "ttft_p50": "TTFT p50",
    "ttft_p99": "TTFT p99",
    "hit_rate": "hit rate ÷ one shared cache",
}
ADDED = {
    "time to first token of 16k tokens that nobody has, in place": "df14a072 inplace_miss_16k",
    "the same through a pool, vLLM 0.26": "5052c6c vllm_miss_overhead_16k",
    "requests/s of 3,000 requests that share nothing, H100s": "0d1c9cb5 inplace_short_tax",
    "p99 between an owner's tokens, three readers in place, H100s": (
        "feee9c25 inplace_tpot_p99_owner_3_readers"
    ),
    "p99 between an owner's tokens, three readers through a pool": (
        "b8547c01 vllm_tpot_p99_owner_3_readers"
    ),
}
SIGNS = {"<=": "≤", ">=": "≥"}


def signed(limit: str) -> str:
    sign, value = limit.split()[:2]
    return f"{SIGNS[sign]} {value}"


APART = {
    "0b6dc209": {
        "8k, one": "pd_{}_8k_1_128",
        "8k, one, busy": "pd_{}_8k_1_128_busy8",
        "8k, 8, busy": "pd_{}_8k_8_128_busy8",
        "8k, 32, busy": "pd_{}_8k_32_128_busy8",
        "32k, 8, busy": "pd_{}_32k_8_128_busy8",
    },
    "338d8dc3": {
        "8k, one": "pd_{}_8k_1_128",
        "8k, 8": "pd_{}_8k_8_128",
        "8k, 32": "pd_{}_8k_32_128",
        "32k, 8": "pd_{}_32k_8_128",
    },
    "6892e4c1": {
        "8k, 16": "pd_{}_8k_16_128",
        "8k, 8, answers of 512": "pd_{}_8k_8_512",
        "32k, one": "pd_{}_32k_1_128",
    },
    "497ccee4": {
        "2 + 2 servers: 8k, one": "x4_pd_{}_8k_1_128",
        "2 + 2 servers: 8k, 8": "x4_pd_{}_8k_8_128",
        "2 + 2 servers: 8k, 16": "x4_pd_{}_8k_16_128",
        "2 + 2 servers: 8k, 32": "x4_pd_{}_8k_32_128",
        "2 + 2 servers: 8k, 64": "x4_pd_{}_8k_64_128",
    },
    "decea747": {"3 + 1 servers: 32k, 8": "x4_pd_{}_32k_8_128_3+1"},
}
"""By commit: servers, prompts and requests in flight, and what rows call them."""


def prefill_and_decode() -> str:
    """Prefill apart: vcache beside NIXL."""
    shown = list[list[str]]()
    for commit, name, case in [(one, *each) for one in APART for each in APART[one].items()]:
        found = rows("prefill-decode", commit)
        handover = found[case.format("handover_p50")]
        cells = [f"{handover['value']:.1f}", f"{handover['reference']:.1f}"]
        for figure in ("handover_p50", "tpot_p50", "gap_p99", "throughput"):
            row = found[case.format(figure)]
            cells.append(cell(row, row["ratio"], "{:.3f}"))
        shown.append([name, *cells, str(handover["runs"]), commit])
    head = "prompt, in flight|handover, ms|NIXL's|÷|TPOT ÷|gap p99 ÷|requests/s ÷|runs|commit"
    return table(head, shown)


def added() -> str:
    lines = []
    for name, place in ADDED.items():
        commit, case = place.split()
        row = rows("costs", commit)[case]
        lines.append([name, cell(row, row["ratio"], "{:.3f}"), signed(row["limit"]), commit])
    return table("what|with ÷ without|limit|commit", lines)


def scheduler() -> str:
    lines = []
    for side, name in ("inplace", "in place"), ("vllm", "through a pool"):
        for kind in ("hit", "miss"):
            texts = []
            for commit in ("9c539e28", "decea747"):
                row = rows("costs", commit)[f"{side}_scheduler_us_16k_{kind}_16_running"]
                limit = row["reference"]
                text = cell({"ok": row["value"] <= limit}, row["value"], "{:,.0f}")
                # There the pool was too small for hits.
                texts.append("" if "(0 of" in row["what"] else text)
            lines.append([f"{kind} {name}", *texts, f"≤ {limit:,.0f}"])
    head = "request of 16k tokens|µs, commit 9c539e28|another host, commit decea747|limit"
    return table(head, lines)


def late() -> str:
    found = rows("ttft", "9612ea56")
    several = [
        [found[f"{side}_async_ttft_{length}"] for side in ("inplace", "vllm")] for length in LENGTHS
    ]
    lines = [
        [length, *(cell(row, row["ratio"], "{:.3f}") for row in pair)]
        for length, pair in zip(LENGTHS, several, strict=True)
    ]
    return table("tokens|in place ÷ limit|through a pool, H100s ÷ limit", lines)


def copied() -> str:
    found = rows("copies", "7cf2a5da")
    lines = [
        [name, cell(found[case], found[case]["ratio"], "{:.3f}"), signed(found[case]["limit"])]
        for case, name in COPIES.items()
    ]
    whole = rows("copies", "087a050eec20")["engine_retrieve_4096"]
    name = "`retrieve()` of 512 MiB from another GPU: time ÷ copy engine's"
    lines.append([name, cell(whole, whole["ratio"], "{:.3f}"), signed(whole["limit"])])
    return table("copy|vcache ÷ copy engine|limit", lines)


SERVER = {
    "lookup_64_p50_us": "look-up of 64 keys over the socket, median, µs",
    "lookup_64_p99_us": "look-up of 64 keys over the socket, p99, µs",
    "lookup_keys_per_s": "keys looked up a second, four clients",
    "put_keys_per_s": "keys stored a second in a full pool, four clients",
    "server_bytes_per_chunk": "memory of a chunk in the server, bytes",
}


def server() -> str:
    lines = []
    for case, name in SERVER.items():
        row = rows("copies", "d98efc0590a9")[case]
        limit = f"{row['limit'].split()[0]} {row['reference']:,.0f}"
        lines.append([name, cell(row, row["value"], "{:,.0f}"), signed(limit)])
    return table("what|measured|limit", lines)


FAILURES = {
    "ten engines, a pool far too small": "6df87a65 soak_{}",
    "in place, stopped and killed at every step": "6df87a65 inplace_{}_cpu",
    "three vLLMs in place, on the CPU": "6df87a65 death_{}",
    "three vLLMs through a pool, on the CPU": "e18f4c55 death_pool_{}",
    "three vLLMs in place, two H200s": "0302b04 death_{}",
    "three vLLMs through a pool, two H200s": "0302b04 death_pool_{}",
}


def failures() -> str:
    lines = []
    for name, place in FAILURES.items():
        commit, case = place.split()
        found = rows("failures", commit)
        wrong, control = (found[case.format(what)] for what in ("wrong", "control_wrong"))
        answers, bad = f"{wrong['runs']:,}", cell(wrong, wrong["value"], "{:.0f}")
        more = f"{control['runs']:,}", cell(control, control["value"], "{:.0f}")
        lines.append([name, answers, bad, *more])
    return table("what|answers|wrong|answers, control|wrong, control", lines)


def tables() -> dict[str, str]:
    """By the name in the page's mark."""
    ends = tuple(TITLES)
    return {
        "equality": equality(),
        "first token": late(),
        "two servers": compared(TWO, "routed_{}_turn", *ends),
        "four servers": compared(FOUR, "x4_{}_turn", *ends),
        "ranks": compared(RANKS, "dp_{}", *ends[:2]),
        "prefill and decode": prefill_and_decode(),
        "added": added(),
        "scheduler": scheduler(),
        "copies": copied(),
        "server": server(),
        "failures": failures(),
    }


def claims() -> list[tuple[str, str]]:
    """What sentences of other pages say: the page, and the words with the figure."""
    hit = rows("ttft", "9612ea56")
    sooner = hit["inplace_recompute_ms_16k"]["value"] / hit["inplace_vcache_ms_16k"]["value"]
    missed = rows("costs", "df14a072")["inplace_miss_16k"]["ratio"]
    two = {name: rows(*run)[f"routed_{name}_turn_throughput"]["ratio"] for name, run in TWO.items()}
    hot = rows(*FOUR["hot"])["x4_hot_turn_throughput"]["ratio"]
    ranks = [
        rows(*RANKS[name])[f"x4_dp_{workload_of(name)}_throughput"]["ratio"]
        for name in ("prefix, four ranks", "chat, four ranks", "chat, four ranks, gpt-oss")
    ]
    handover = rows("prefill-decode", "497ccee4")["x4_pd_handover_p50_8k_8_128"]["ratio"]
    readme = [f"**× {ratio:.2f}**" for ratio in (*ranks, two["fork"], two["cold"])]
    readme += [f"**{times:.1f} times sooner**" for times in (sooner, 1 / handover)]
    readme.append(f"takes {missed:.3f} times")
    choose = [f"requests/s × {two[name]:.2f}" for name in ("fork", "cold")]
    lower = (two["chat"], two["prefix"], two["contention"], hot)
    choose += [f"{100 * (1 - ratio):.0f} % lower" for ratio in lower]
    pages = {"README.md": readme, "docs/choose.md": choose}
    return [(page, words) for page, several in pages.items() for words in several]


def filled(page: str) -> str:
    """The page with its tables."""
    for name, text in tables().items():
        mark = f"<!-- scripts/figures.py: {name} -->\n"
        before, found, after = page.partition(mark)
        if not found:
            continue
        page = before + mark + text + re.sub(r"\A(\|.*\n)*", "", after)
    return page


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (PICTURES / name).write_text(text)
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
