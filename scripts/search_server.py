r"""Searches a local corpus over HTTP by BM25, for rollouts on many machines, with the interface of Search-R1's server.

    python scripts/search_server.py --corpus corpus.jsonl --port 8000 --index corpus.index

    POST /retrieve  {"queries": ["who tends otters"], "topk": 3, "return_scores": true}
      -> {"result": [[{"document": {"id": "17", "title": "Otter", "contents": "\"Otter\"\nThe …"}, "score": 4.2}, …]]}
    GET /health     -> {"status": "ok", "documents": 20000}

Each query gets a list, best document first; without return_scores the lists hold only documents. The corpus is JSONL
or Parquet (see verl/workers/rollout/tools/search/bm25_index.py). With --index the index is made once and kept in that
folder. As there is no password, the server listens on this machine only, unless --host names another address.

Several processes search in one index in memory. Queries wait for a free process in order of arrival; those of clients
that have gone are skipped. A request whose queries would wait longer than --longest-wait gets status 503 at once.
"""

import argparse
import asyncio
import ctypes
import json
import os
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect

from verl.workers.rollout.tools.search.bm25_index import Bm25Index, open_index

MAX_BODY_BYTES = 4_000_000
MAX_QUERIES, MAX_QUERY_CHARS, MAX_TOPK = 1024, 4096, 100
MAX_RESULTS = 10_000
MAX_CONNECTIONS = 2048
TRIAL = "what was the first city of the world"


class Retrieve(BaseModel):
    """The body of POST /retrieve."""

    model_config = ConfigDict(extra="forbid", strict=True)

    queries: Annotated[list[Annotated[str, Field(max_length=MAX_QUERY_CHARS)]], Field(max_length=MAX_QUERIES)]
    topk: Annotated[int, Field(ge=1, le=MAX_TOPK)] | None = None
    return_scores: bool = False


class SearchProcesses:
    """Forked processes that search in one index; queries wait in order of arrival, and are refused if they would wait
    longer than `longest_wait` seconds."""

    def __init__(self, index: Bm25Index, number: int, longest_wait: float):
        self.index, self.number, self.longest_wait = index, number, longest_wait
        self.free = asyncio.Semaphore(number)
        self.waiting = 0  # queries of all open requests
        self._start()
        for _ in range(2):  # the first search also reads the index from the disk
            started = time.monotonic()
            self.pool.submit(search, TRIAL, 1, False).result()
            self.seconds = time.monotonic() - started

    def _start(self) -> None:
        self.pool = ProcessPoolExecutor(self.number, get_context("fork"), _begin, (self.index,))

    async def search_all(self, request: Request, queries: list[str], *options) -> list[bytes]:
        """Return what `search` returns for each query of a request, with its options."""
        if self.waiting * self.seconds > self.number * self.longest_wait:
            raise HTTPException(503, "too many queries wait")
        self.waiting += len(queries)
        try:
            return await asyncio.gather(*(self._search(request, query, *options) for query in queries))
        finally:
            self.waiting -= len(queries)

    async def _search(self, request: Request, *query) -> bytes:
        async with self.free:
            if await request.is_disconnected():
                raise HTTPException(400, "the connection broke")
            started, pool = time.monotonic(), self.pool
            try:
                documents = await asyncio.get_running_loop().run_in_executor(pool, search, *query)
            except BrokenProcessPool as error:
                if pool is self.pool:  # no other search has replaced the processes
                    self._start()
                raise HTTPException(503, "a search process died") from error
            self.seconds += 0.1 * (time.monotonic() - started - self.seconds)
            return documents


_index: Bm25Index  # the index that a search process reads


def _begin(index: Bm25Index) -> None:
    """Prepare a search process."""
    global _index
    _index = index
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the server ends them
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the server


def search(query: str, topk: int, return_scores: bool) -> bytes:
    """Return the documents for a query as UTF-8 encoded JSON, in a search process."""
    documents = [
        ({"id": document.id, "title": document.title, "contents": document.contents}, score)
        for document, score in _index.search(query, topk)
    ]
    rows = [{"document": d, "score": s} if return_scores else d for d, s in documents]
    return json.dumps(rows, ensure_ascii=False, allow_nan=False).encode()


def make_app(processes: SearchProcesses, default_topk: int = 3) -> FastAPI:
    app = FastAPI(title="BM25 search", openapi_url=None)

    @app.get("/health")
    async def health() -> dict:
        return {"status": "ok", "documents": len(processes.index)}

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        try:
            body = Retrieve.model_validate_json(await bounded_body(request))
        except ClientDisconnect as error:
            raise HTTPException(400, "the connection broke") from error  # the client cannot read it
        except ValidationError as error:
            # without the client's input, which may be long
            detail = error.errors(include_url=False, include_context=False, include_input=False)[:3]
            raise HTTPException(422, detail) from error
        topk = body.topk or default_topk
        if len(body.queries) * topk > MAX_RESULTS:
            raise HTTPException(422, f"queries times topk must be at most {MAX_RESULTS}")
        lists = await processes.search_all(request, body.queries, topk, body.return_scores)
        return Response(b'{"result": [' + b", ".join(lists) + b"]}", media_type="application/json")

    return app


async def bounded_body(request: Request) -> bytes:
    """Return the request's body. A body that is too long is refused with status 413 and not read to its end."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


class Server(uvicorn.Server):
    """A server that prints its address when it starts: with --port 0 the operating system chooses the port."""

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", metavar="FILE", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    parser.add_argument("--index", metavar="DIR", type=Path, help="folder to keep the index in; default: not kept")
    parser.add_argument("--topk", type=int, default=3, help="for requests without topk; default: 3")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one a CPU")
    parser.add_argument("--longest-wait", metavar="SECONDS", type=float, default=10, help="default: 10")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn shuts down and then raises the signal again
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        index = open_index(options.corpus, options.index)
        processes = SearchProcesses(index, options.processes, options.longest_wait)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    config = uvicorn.Config(
        make_app(processes, options.topk),
        host=options.host,
        port=options.port,
        log_level="error",
        access_log=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=5,
    )
    Server(config).run()


if __name__ == "__main__":
    main()
