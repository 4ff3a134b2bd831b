"""Searches a second over a made corpus: in this process, and over HTTP with 1, 16 and 64 clients at once.

    python benchmarks/search_server.py [--documents 20000] [--seconds 3] [--runs 5]

Baseline: the same index in this process, without HTTP. Server and clients share the machine; a client is a bare socket
that sends its next query when it has read the whole reply. Writes benchmarks/results/search_server.md.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from benchmarks.report import write_report
from verl.workers.rollout.tools.bm25_index import open_index

ROOT = Path(__file__).resolve().parents[1]
CLIENTS = (1, 16, 64)
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


async def searched_by_clients(n: int, port: int, queries: list[str], seconds: float) -> list[float]:
    """Seconds of each search of n clients at once, each with other queries."""
    end = time.perf_counter() + seconds
    shares = await asyncio.gather(*(one_client(port, queries[i:] + queries[:i], end) for i in range(n)))
    return [second for share in shares for second in share]


def measured(index, server: psutil.Process, port: int, queries: list[str], seconds: float) -> dict[str, tuple]:
    """For each way of searching: searches a second, p50 and p99 in seconds, seconds of processor time a search."""
    results = {}

    def note(name: str, process: psutil.Process, search: Callable[[], list[float]]) -> None:
        before = sum(process.cpu_times()[:2])
        took = search()
        worked = sum(process.cpu_times()[:2]) - before
        results[name] = (len(took) / seconds, *np.percentile(took, [50, 99]), worked / len(took))

    note("in this process (baseline)", psutil.Process(), lambda: searched_here(index, queries, seconds))
    for n in CLIENTS:
        search = partial(asyncio.run, searched_by_clients(n, port, queries, seconds))
        note(f"HTTP, {n} client{'s' * (n > 1)}", server, search)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=3, help="for each way of searching in each run")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    queries = made_texts(rng, 1000, QUERY_WORDS)
    with tempfile.TemporaryDirectory() as folder:
        corpus, kept = Path(folder, "corpus.jsonl"), Path(folder, "index")
        texts = made_texts(rng, options.documents, DOCUMENT_WORDS)
        corpus.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
        start = time.perf_counter()
        index = open_index(corpus, kept)
        to_make = time.perf_counter() - start
        command = [sys.executable, "-W", "ignore", ROOT / "scripts" / "search_server.py", "--port", "0"]
        command += ["--corpus", corpus, "--index", kept]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
            try:
                said = next(line for line in server.stdout if line.startswith("listening"))
                port = int(said.rpartition(":")[2])
                at = (index, psutil.Process(server.pid), port, queries)
                measured(*at, 0.5)  # warm
                runs = [measured(*at, options.seconds) for _ in range(options.runs)]
            finally:
                server.terminate()
    write(options, runs, to_make)


def write(options: argparse.Namespace, runs: list[dict], to_make: float) -> None:
    baseline, *_ = runs[0]
    rows = []
    for name in runs[0]:
        rate, *seconds = (statistics.median(run[name][i] for run in runs) for i in range(4))
        ratios = [run[name][0] / run[baseline][0] for run in runs]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append((name, f"{rate:.0f}", spread, *(f"{1e3 * each:.2f}" for each in seconds)))
    write_report(
        "search_server",
        f"Searches over {options.documents:,} made documents of {DOCUMENT_WORDS} words, queries of {QUERY_WORDS}, "
        f"the best {TOPK}. Medians of {options.runs} runs of {options.seconds:g} s for each row in turn; ratios are to "
        f"the baseline of the same run (least to greatest in brackets). Making and keeping the index: {to_make:.1f} s, "
        "once. Server and clients share the cores; processor time is the searching process's alone, all of it. "
        f"Load average at the end: {os.getloadavg()[0]:.1f}; above the cores, other work took its share.",
        ("searching", "a second", "ratio", "p50, ms", "p99, ms", "processor, ms a search"),
        rows,
    )


if __name__ == "__main__":
    main()
