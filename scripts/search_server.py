r"""Searches a local corpus over HTTP by BM25, for rollouts on many machines, with the interface of Search-R1's server.

    python scripts/search_server.py --corpus corpus.jsonl --port 8000 --index corpus.index

    POST /retrieve  {"queries": ["who tends otters"], "topk": 3, "return_scores": true}
      -> {"result": [[{"document": {"id": "17", "title": "Otter", "contents": "\"Otter\"\nThe …"}, "score": 4.2}, …]]}
    GET /health     -> {"status": "ok", "documents": 20000}

Each query gets a list, best document first; without return_scores the lists hold only documents. The corpus is JSONL
or Parquet (see verl/workers/rollout/tools/search/bm25_index.py). With --index the index is made once and kept in that
folder. As there is no password, the server listens on this machine only, unless --host names another address.

Uvicorn's workers search in one index, which they map into memory. A worker with --max-requests at once answers
further ones by status 503.
"""

import argparse
import asyncio
import ctypes
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect
from uvicorn.supervisors import Multiprocess

from verl.workers.rollout.tools.search.bm25_index import Bm25Index, open_index

MAX_BODY_BYTES = 4_000_000
MAX_QUERIES, MAX_QUERY_CHARS, MAX_TOPK = 1024, 4096, 100
MAX_RESULTS = 10_000
SETTINGS = "VERL_SEARCH_SERVER"  # environment variable by which a worker gets the index's folder and the default topk


class Retrieve(BaseModel):
    """The body of POST /retrieve."""

    model_config = ConfigDict(extra="forbid", strict=True)

    queries: Annotated[list[Annotated[str, Field(max_length=MAX_QUERY_CHARS)]], Field(max_length=MAX_QUERIES)]
    topk: Annotated[int, Field(ge=1, le=MAX_TOPK)] | None = None
    return_scores: bool = False


def search(index: Bm25Index, queries: list[str], topk: int, return_scores: bool) -> bytes:
    """Return the reply to a request as UTF-8 encoded JSON."""
    lists = []
    for query in queries:
        documents = [
            ({"id": document.id, "title": document.title, "contents": document.contents}, score)
            for document, score in index.search(query, topk)
        ]
        lists.append([{"document": d, "score": s} if return_scores else d for d, s in documents])
    return json.dumps({"result": lists}, ensure_ascii=False, allow_nan=False).encode()


def make_app() -> FastAPI:
    """Return the application of a worker."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: it ends with the server
    folder, default_topk = json.loads(os.environ[SETTINGS])
    index = Bm25Index.load(Path(folder))
    app = FastAPI(title="BM25 search", openapi_url=None)

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
            # without the client's input, which may be long
            detail = error.errors(include_url=False, include_context=False, include_input=False)[:3]
            raise HTTPException(422, detail) from error
        topk = body.topk or default_topk
        if len(body.queries) * topk > MAX_RESULTS:
            raise HTTPException(422, f"queries times topk must be at most {MAX_RESULTS}")
        reply = await asyncio.to_thread(search, index, body.queries, topk, body.return_scores)
        return Response(reply, media_type="application/json")

    return app


async def bounded_body(request: Request) -> bytes:
    """Return the request's body. A body that is too long is refused with status 413 and not read to its end."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", metavar="FILE", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    parser.add_argument("--index", metavar="DIR", type=Path, help="folder to keep the index in; default: not kept")
    parser.add_argument("--topk", type=int, default=3, help="for requests without topk; default: 3")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one a CPU")
    parser.add_argument("--max-requests", type=int, default=64, help="of a process at once; default: 64")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.index or Path(temporary, "index")).expanduser()
        try:
            open_index(options.corpus, folder)
        except (OSError, ValueError) as error:
            sys.exit(f"error: {error}")
        os.environ[SETTINGS] = json.dumps([str(folder), options.topk])
        config = uvicorn.Config(
            "search_server:make_app",
            factory=True,
            host=options.host,
            port=options.port,
            workers=options.processes,
            log_level="error",
            access_log=False,
            limit_concurrency=options.max_requests,
            headers=[("connection", "close")],  # one that waits for a next request would count, too
            timeout_graceful_shutdown=5,
            timeout_worker_healthcheck=60,
        )
        listener = config.bind_socket()
        listener.listen()  # requests wait until the workers have started
        host, port = listener.getsockname()[:2]
        print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
        Multiprocess(config, [listener]).run()


if __name__ == "__main__":
    main()
