"""Compares scripts/search_server.py of this commit with that of an earlier one, in turn.

    python benchmarks/search_server.py [--documents 1000000] [--seconds 10] [--runs 3] [--base f63e928]

First part: searches a second over made passages of 60 content words, as frequent as in language (Zipf). A client is a
bare socket that sends its next query when it has read the reply. Second part: 512 calls of the search tool at once, with
the tool box's limits and retries, to an index of which a search takes 0.14 s, as with 21 million passages. It sleeps, so
that this machine's cores do not limit the number of processes. Prints two tables.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
CLIENTS = (1, 16, 64)
TOPK, QUERY_WORDS, PASSAGE_WORDS, VOCABULARY = 3, 8, 60, 300_000
CALLS, SEARCH_SECONDS = 512, 0.14
SLOW_SERVER = f"""
import sys, time, types
sys.path.insert(0, "scripts")
import search_server as server
class Index:
    def __len__(self):
        return 21_000_000
    def search(self, query, k):
        time.sleep({SEARCH_SECONDS})
        return [(types.SimpleNamespace(id="1", title="", contents=query), 1.0)]
server.open_index = lambda corpus, folder: Index()
server.main(sys.argv[1:])
"""
TOOL_CALLS = f"""
import asyncio, json, logging, sys, time
from verl.workers.rollout.tools.tool_box import ToolBox, ToolsConfig
logging.disable()
async def main():
    class_path = "verl.workers.rollout.tools.search.tool.LocalSearchTool"
    search = {{"class_path": class_path, "params": {{"url": sys.argv[1]}}}}
    tools, started = ToolBox(ToolsConfig(max_workers={CALLS}, tool_instances={{"search": search}})), time.monotonic()
    async def call(i):
        outcome = await tools.call("search", f"q{{i}}")
        return outcome.ok, time.monotonic() - started
    print(json.dumps(await asyncio.gather(*map(call, range({CALLS})))))
asyncio.run(main())
"""


def made_texts(rng: np.random.Generator, n: int, n_words: int) -> list[str]:
    """Return texts in which the r-th most frequent word occurs in proportion to 1/r."""
    cumulated = np.cumsum(1 / np.arange(1, VOCABULARY + 1))
    rows = np.searchsorted(cumulated, rng.random((n, n_words)) * cumulated[-1])
    return [" ".join(f"w{word}" for word in row) for row in rows]


@contextlib.contextmanager
def serving(folder: Path, *arguments) -> Iterator[str]:
    """Start Python with the arguments in a checkout, and yield the address on which it listens."""
    command = [sys.executable, "-W", "ignore", *map(str, arguments), "--port", "0"]
    options = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": str(folder)}, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as server:
        try:
            yield next(line for line in server.stdout if line.startswith("listening")).split()[-1]
        finally:
            server.terminate()


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


async def searched(n: int, port: int, queries: list[str], seconds: float) -> tuple[float, float, float]:
    """Return searches a second, and p50 and p99 of their milliseconds."""
    end = time.perf_counter() + seconds
    shares = await asyncio.gather(*(one_client(port, queries[i:] + queries[:i], end) for i in range(n)))
    took = [second for share in shares for second in share]
    return len(took) / seconds, *(1e3 * np.percentile(took, [50, 99]))


def tool_calls(folder: Path, url: str) -> tuple[float, float, float]:
    """Return the share of failed calls in percent, answers a second, and seconds until all calls ended."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-W", "ignore", "-c", TOOL_CALLS, url]
    out = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout
    outcomes = json.loads(out.splitlines()[-1])
    answered, end = sum(ok for ok, _ in outcomes), max(seconds for _, seconds in outcomes)
    return 100 * (1 - answered / CALLS), answered / end, end


def print_table(name: str, columns: tuple[str, ...], runs: list[dict[str, tuple]], baseline_of) -> None:
    """Print medians, and the ratio of the runs' rates to those of the baseline in the same run."""
    print(f"\n| {name} | {' | '.join(columns)} | ratio |\n|{' --- |' * (len(columns) + 2)}")
    rate = next(i for i, column in enumerate(columns) if "a second" in column)
    for row in runs[0]:
        values = [f"{statistics.median(run[row][i] for run in runs):.1f}" for i in range(len(columns))]
        ratios = [run[row][rate] / max(run[baseline_of(row)][rate], 1e-9) for run in runs]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {row} | {' | '.join(values)} | {spread} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=10, help="for each number of clients in each run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--base", default="f63e928", help="commit of the earlier server")
    parser.add_argument(
        "--folder", type=Path, help="keeps corpus and index for further calls; default: a temporary one"
    )
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    queries = made_texts(rng, 1000, QUERY_WORDS)
    with tempfile.TemporaryDirectory() as temporary:
        base, corpus = Path(temporary, "base"), Path(temporary, "corpus.jsonl")
        base.mkdir()
        archive = subprocess.run(["git", "archive", options.base], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", base], input=archive, check=True)
        with corpus.open("w") as file:
            for first in range(0, options.documents, 10_000):
                texts = made_texts(rng, min(10_000, options.documents - first), PASSAGE_WORDS)
                file.writelines(json.dumps({"id": first + i, "text": text}) + "\n" for i, text in enumerate(texts))
        arguments = ("scripts/search_server.py", "--corpus", corpus, "--index", Path(temporary, "index"))
        with serving(base, *arguments) as before, serving(ROOT, *arguments) as now:
            runs = []
            for run in range(options.runs + 1):  # the first one warms
                runs.append({})
                for n in CLIENTS:
                    for name, url in (("before", before), ("now", now)):
                        work = searched(n, int(url.rpartition(":")[2]), queries, options.seconds if run else 1)
                        runs[-1][f"{name}, {n} client{'s' * (n > 1)}"] = asyncio.run(work)
        columns = ("searches a second", "p50, ms", "p99, ms")
        print_table("server", columns, runs[1:], lambda row: row.replace("now", "before"))

        slow = ("-c", SLOW_SERVER, "--corpus", "none")
        runs = []
        for _ in range(options.runs):
            runs.append({})
            for name, folder, more in (
                ("before: one thread", base, ()),
                ("now: 2 processes", ROOT, ("--processes", 2)),
                ("now: 16 processes", ROOT, ("--processes", 16)),
            ):
                with serving(folder, *slow, *more) as url:
                    runs[-1][name] = tool_calls(folder, url)
        columns = ("failed calls, %", "answers a second", "until all ended, s")
        print_table("server", columns, runs, lambda row: "before: one thread")
        print(f"load average at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
