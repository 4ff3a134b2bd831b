"""Searches a second over a synthetic corpus, in this process, and over HTTP with 1, 16 and 64 clients at once.

    python -m benchmarks.search_server [--documents 20000] [--seconds 3] [--runs 5]

Baseline: the same index in this process, without HTTP. In each run each way of searching goes on for `--seconds`.
Server and clients share the machine; a client is a bare socket that sends its next query when it has read the whole
reply. Writes benchmarks/results/search_server.md.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks.report import in_turns, parser_of, with_range, write_report
from verl.workers.rollout.tools.bm25_index import open_index

ROOT = Path(__file__).resolve().parents[1]
CLIENTS = (1, 16, 64)
BASELINE = "in this process (baseline)"
TOPK, QUERY_WORDS, DOCUMENT_WORDS, VOCABULARY = 3, 8, 100, 30_000


def made_texts(rng: np.random.Generator, n: int, n_words: int) -> list[str]:
    """Words as often as in language: the r-th most frequent in proportion to 1/r."""
    frequency = 1 / np.arange(1, VOCABULARY + 1)
    words = rng.choice(VOCABULARY, size=(n, n_words), p=frequency / frequency.sum())
    return [" ".join(f"w{word}" for word in row) for row in words]


def searched_here(index, queries: list[str], seconds: float) -> list[float]:
    """Seconds of each search, one after the other."""
    took, end = [], time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        index.search(queries[len(took) % len(queries)], TOPK)
        took.append(time.perf_counter() - start)
    return took


async def one_client(port: int, queries: list[str], end: float) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    took = []
    while (start := time.perf_counter()) < end:
        body = json.dumps({"queries": [queries[len(took) % len(queries)]], "topk": TOPK, "return_scores": True})
        writer.write(f"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0]))
        took.append(time.perf_counter() - start)
    writer.close()
    return took


def searched_by_clients(n: int, port: int, queries: list[str], seconds: float) -> list[float]:
    """Seconds of each search of n clients at once, each with other queries."""

    async def search() -> list[list[float]]:
        end = time.perf_counter() + seconds
        return await asyncio.gather(*(one_client(port, queries[i:] + queries[:i], end) for i in range(n)))

    return [second for share in asyncio.run(search()) for second in share]


class Search(NamedTuple):
    """A way of searching: `search` takes the seconds that it may go on and gives those of each search."""

    process: psutil.Process
    search: Callable[[float], list[float]]

    def measure(self, seconds: float) -> tuple[float, float, float, float]:
        """Searches a second, p50 and p99 in seconds, seconds of processor time a search."""
        before = sum(self.process.cpu_times()[:2])
        took = self.search(seconds)
        worked = sum(self.process.cpu_times()[:2]) - before
        return len(took) / seconds, *np.percentile(took, [50, 99]), worked / len(took)


def ways_of(index, server: psutil.Process, port: int, queries: list[str]) -> dict[str, Search]:
    ways = {BASELINE: Search(psutil.Process(), partial(searched_here, index, queries))}
    for n in CLIENTS:
        ways[f"HTTP, {n} client{'s' * (n > 1)}"] = Search(server, partial(searched_by_clients, n, port, queries))
    return ways


@contextmanager
def serving(*options) -> Iterator[tuple[psutil.Process, int]]:
    """The server's process and its port."""
    command = [sys.executable, "-W", "ignore", ROOT / "scripts" / "search_server.py", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            line = next(line for line in server.stdout if line.startswith("listening"))
            yield psutil.Process(server.pid), int(line.rpartition(":")[2])
        finally:
            server.terminate()


def main() -> None:
    options = parser_of(__doc__, documents=20_000, seconds=3.0, runs=5).parse_args()
    rng = np.random.default_rng(0)
    queries = made_texts(rng, 1000, QUERY_WORDS)
    with tempfile.TemporaryDirectory() as folder:
        corpus, kept = Path(folder, "corpus.jsonl"), Path(folder, "index")
        texts = made_texts(rng, options.documents, DOCUMENT_WORDS)
        corpus.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
        start = time.perf_counter()
        index = open_index(corpus, kept)
        to_make = time.perf_counter() - start
        with serving("--corpus", corpus, "--index", kept) as (server, port):
            ways = ways_of(index, server, port, queries)
            for way in ways.values():
                way.measure(0.5)  # warm
            sides = {name: lambda run, way=way: way.measure(options.seconds) for name, way in ways.items()}
            write(options, in_turns(sides, options.runs), to_make)


def write(options: argparse.Namespace, results: dict[str, list[tuple[float, ...]]], to_make: float) -> None:
    rows = []
    for name, runs in results.items():
        rate, *seconds = (statistics.median(column) for column in zip(*runs, strict=True))
        ratios = [ours[0] / baseline[0] for ours, baseline in zip(runs, results[BASELINE], strict=True)]
        rows.append((name, f"{rate:.0f}", with_range(ratios, ".2f"), *(f"{1e3 * each:.2f}" for each in seconds)))
    write_report(
        "search_server",
        f"Searches over {options.documents:,} synthetic documents of {DOCUMENT_WORDS} words, queries of {QUERY_WORDS}, "
        f"the best {TOPK}. Medians of {options.runs} runs of {options.seconds:g} s for each row in turn; ratios are to "
        f"the baseline of the same run (least to greatest in brackets). Making and keeping the index: {to_make:.1f} s, "
        "once. Server and clients share the cores; processor time is the searching process's alone, all of it. "
        f"Load average at the end: {os.getloadavg()[0]:.1f}; above the cores, other work took its share.",
        ("searching", "a second", "ratio", "p50, ms", "p99, ms", "processor, ms a search"),
        rows,
    )


if __name__ == "__main__":
    main()
