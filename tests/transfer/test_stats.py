"""What a session counts, and what of it the server hears."""

from __future__ import annotations

from engine_cases import Node, Pair, fresh, get, pair, put
from kv_cases import CHUNK, prompt
from processes import QUICK, eventually

__all__ = ["fresh", "pair"]


# ---- statistics


def test_stats_count_what_happened(fresh: Node) -> None:
    # Loads are told with heartbeats.
    fresh.client_config = QUICK
    pair = Pair(fresh, chunks=4)
    chunk = pair.mine.chunk_bytes
    put(pair.writer, pair.mine, prompt(3 * CHUNK))
    assert pair.writer.lookup(prompt(5 * CHUNK)) == 3 * CHUNK
    assert get(pair.writer, pair.mine, prompt(2 * CHUNK)) == 2 * CHUNK
    assert get(pair.reader, pair.theirs, prompt(5 * CHUNK)) == 3 * CHUNK
    writer, reader = pair.writer.get_stats(), pair.reader.get_stats()
    tokens = {"asked": 5, "hit": 3, "retrieved": 2, "stored": 3}
    assert writer["tokens"] == {name: count * CHUNK for name, count in tokens.items()}
    assert (writer["hits"]["vram"], writer["misses"]) == (2, 0)
    assert (reader["hits"]["vram"], reader["misses"]) == (3, 2)
    below = {"offload": 0, "offload_written": 0}
    assert writer["bytes"] == {"own": 2 * chunk, "peer": 0, "stored": 3 * chunk} | below
    assert reader["bytes"] == {"own": 0, "peer": 3 * chunk, "stored": 0} | below
    assert (reader["device"], reader["connected"], reader["failures"]) == ("host:b", True, {})
    (segment,) = reader["server"]["segments"].values()
    assert (segment["device"], segment["used"], segment["chunks"]) == ("host:a", 3 * chunk, 3)
    # Two loads of two and three chunks, out of the pool.
    stats = pair.writer._session.client.stats
    eventually(lambda: stats().minute == (2, 5 * CHUNK))
    read = {row.nbytes: (row.instance, row.tokens) for row in stats().reads}
    assert read == {count * chunk: ("pool", count * CHUNK) for count in (2, 3)}
    counted = [writer[name]["count"] for name in ("store", "reserve", "commit", "store_copy")]
    assert counted == [1, 1, 1, 1]
