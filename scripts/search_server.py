r"""Searches a local corpus over HTTP by BM25, for rollouts on many machines, with the interface of Search-R1's server.

    python scripts/search_server.py --corpus corpus.jsonl --port 8000 --index corpus.index

    POST /retrieve  {"queries": ["who tends otters"], "topk": 3, "return_scores": true}
      -> {"result": [[{"document": {"id": "17", "title": "Otter", "contents": "\"Otter\"\nThe …"}, "score": 4.2}, …]]}
    GET /health     -> {"status": "ok", "documents": 20000}

Each query gets a list, best document first; without return_scores the lists hold only documents. The corpus is JSONL
or Parquet (see verl/workers/rollout/tools/search/bm25_index.py). With --index the index is made once and kept in that
folder. As there is no password, the server listens on this machine only, unless --host names another address.
"""

import argparse
import asyncio
import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect

from verl.workers.rollout.tools.search.bm25_index import Bm25Index, open_index

MOST_BODY_BYTES = 4_000_000
MOST_QUERIES, MOST_QUERY_CHARACTERS, MOST_TOPK = 1024, 4096, 100
MOST_RESULTS = 10_000
MOST_CONNECTIONS = 2048


class Retrieve(BaseModel):
    """The body of POST /retrieve."""

    model_config = ConfigDict(extra="forbid", strict=True)

    queries: Annotated[list[Annotated[str, Field(max_length=MOST_QUERY_CHARACTERS)]], Field(max_length=MOST_QUERIES)]
    topk: Annotated[int, Field(ge=1, le=MOST_TOPK)] | None = None
    return_scores: bool = False


def make_app(index: Bm25Index, default_topk: int = 3) -> FastAPI:
    """Return the server's application, which answers POST /retrieve and GET /health from the index."""
    app = FastAPI(title="BM25 search", openapi_url=None)
    # A single thread is enough, because a search holds the interpreter's lock. The event loop stays free for /health.
    searcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="search")

    @app.get("/health")
    async def health() -> dict:
        return {"status": "ok", "documents": len(index)}

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        try:
            body = Retrieve.model_validate_json(await bounded_body(request))
        except ClientDisconnect as error:
            raise HTTPException(400, "the connection broke") from error  # the client cannot read it
        except ValidationError as error:
            # The reply leaves out the client's input, which may be long.
            detail = error.errors(include_url=False, include_context=False, include_input=False)[:3]
            raise HTTPException(422, detail) from error
        topk = body.topk or default_topk
        if len(body.queries) * topk > MOST_RESULTS:
            raise HTTPException(422, f"queries times topk must be at most {MOST_RESULTS}")
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(searcher, answer, index, body.queries, topk, body.return_scores)
        return Response(text, media_type="application/json")

    return app


def answer(index: Bm25Index, queries: list[str], topk: int, return_scores: bool) -> bytes:
    """Return the reply to a request as UTF-8 encoded JSON."""
    lists = []
    for query in queries:
        documents = [
            ({"id": document.id, "title": document.title, "contents": document.contents}, score)
            for document, score in index.search(query, topk)
        ]
        lists.append([{"document": d, "score": s} if return_scores else d for d, s in documents])
    return json.dumps({"result": lists}, ensure_ascii=False, allow_nan=False).encode()


async def bounded_body(request: Request) -> bytes:
    """Return the request's body. A body that is too long is refused with status 413 and not read to its end."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BODY_BYTES:
            raise HTTPException(413, f"the body has more than {MOST_BODY_BYTES} bytes")
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
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn shuts down and then raises the signal again
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        index = open_index(options.corpus, options.index)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    config = uvicorn.Config(
        make_app(index, options.topk),
        host=options.host,
        port=options.port,
        log_level="error",
        access_log=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=5,
    )
    Server(config).run()


if __name__ == "__main__":
    main()
