"""Serves OpenAI's chat completions to programs, whose requests the rollout answers.

A program gets a session: an address and a key of its own. Its requests wait there until the rollout takes them
(`Session.next_request`) and answers them (`Session.reply`), in any order. All of it runs in one event loop, so that
nothing needs a lock.
"""

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from verl.workers.rollout.agent.chat_completions import (
    AgentRequest,
    ApiError,
    Reply,
    agent_request,
    chat_completion,
    error_response,
    event_stream,
)

MAX_BODY_BYTES = 16 * 2**20
KEEP_ALIVE_SECONDS = 3600  # a program may run its tools for long between two requests of a connection


@dataclass(eq=False)
class _WaitingRequest:
    """A request and the future of its reply with the reply's number; None if the session ends first."""

    request: AgentRequest
    answer: "asyncio.Future[tuple[int, Reply] | None]"


class Session:
    """The requests of one program, from `Gateway.open` until `close`."""

    def __init__(self, base_url: str, api_key: str, ended: Callable[[], Any]):
        self.base_url, self.api_key = base_url, api_key
        self.n_requests = self._n_replies = 0
        self._pending: list[_WaitingRequest] = []
        self._handed_out: list[_WaitingRequest] = []
        self._changed, self._closed, self._ended = asyncio.Event(), False, ended

    @property
    def requests(self) -> list[AgentRequest]:
        """Requests that are not yet handed out, in order of arrival."""
        return [call.request for call in self._pending]

    async def next_request(self, expected: AgentRequest | None = None) -> AgentRequest:
        """Hand out the first pending request, or the first that equals `expected`; wait until there is one. A cancelled
        call hands out nothing. Raise RuntimeError if the session is closed."""
        while not self._closed:
            for call in self._pending:
                if expected is None or call.request == expected:
                    self._pending.remove(call)
                    self._handed_out.append(call)
                    return call.request
            self._changed.clear()
            await self._changed.wait()
        raise RuntimeError("the session is closed")

    def reply(self, request: AgentRequest, reply: Reply) -> None:
        """Answer a request that was handed out, the first of equal ones. The reply is dropped if its client has left.
        Raise RuntimeError if the session is closed, and ValueError if no such request waits."""
        if self._closed:
            raise RuntimeError("the session is closed")
        call = next((call for call in self._handed_out if call.request == request), None)
        if call is None:
            raise ValueError("reply: expected a request that was handed out and has no reply yet")
        self._handed_out.remove(call)
        self._n_replies += 1
        if not call.answer.done():
            call.answer.set_result((self._n_replies, reply))

    def close(self) -> None:
        """End the session: its pending requests get status 410, later ones 404, and calls of `next_request` raise."""
        if self._closed:
            return
        self._closed = True
        for call in self._pending + self._handed_out:
            if not call.answer.done():
                call.answer.set_result(None)
        self._pending, self._handed_out = [], []
        self._changed.set()
        self._ended()

    def _add(self, request: AgentRequest) -> _WaitingRequest:
        if self._closed:
            raise _ended_error()
        answer = asyncio.get_running_loop().create_future()
        for call in self._handed_out:
            if call.answer.cancelled() and call.request == request:  # its client has given up, and asks again
                call.answer = answer
                return call
        call = _WaitingRequest(request, answer)
        self.n_requests += 1
        self._pending.append(call)
        self._changed.set()
        return call

    def _drop(self, call: _WaitingRequest) -> None:
        """Forget the reply of a call whose client has left."""
        call.answer.cancel()
        if call in self._pending:
            self._pending.remove(call)


class Gateway:
    """The HTTP server of a rollout worker and its sessions. It listens at `host`; texts that match `ignored`, regular
    expressions, make no difference between requests."""

    def __init__(self, host: str = "127.0.0.1", ignored: Sequence[str] = ()):
        self.host, self.ignored = host, tuple(ignored)
        self._sessions: dict[str, Session] = {}
        self._starting: asyncio.Task[None] | None = None
        self._url = ""

    async def start(self) -> None:
        """Start the server in the running event loop, once; later callers wait until it has started."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        listener = socket.create_server((self.host, 0))
        # accepted connections inherit it; without it a reply waits 40 ms for the client's delayed ACK
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        routes = [
            Route("/s/{id}/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/s/{id}/v1/models", self._models, methods=["GET"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes, exception_handlers={HTTPException: error_response}),
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            date_header=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._serving.done():
                raise RuntimeError("the gateway's server ended at its start") from self._serving.exception()
            await asyncio.sleep(0.001)
        own = ray.util.get_node_ip_address() if self.host == "0.0.0.0" else self.host
        self._url = f"http://{own}:{listener.getsockname()[1]}"

    def open(self) -> Session:
        """Return a new session of a gateway that has started."""
        if not self._url:
            raise RuntimeError("the gateway has not started: await start() first")
        name, key = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self._sessions[name] = Session(f"{self._url}/s/{name}/v1", key, lambda: self._sessions.pop(name))
        return self._sessions[name]

    async def stop(self) -> None:
        """End all sessions and the server."""
        if self._starting is None:
            return
        starting, self._starting = self._starting, None
        await asyncio.wait({starting})
        if self._url:
            self._url = ""
            for session in list(self._sessions.values()):
                session.close()
            self._server.should_exit = True
            await self._serving

    # ---- requests ----

    async def _models(self, http: Request) -> Response:
        self._session(http)
        models = [{"id": "model", "object": "model", "created": 0, "owned_by": "verl"}]
        return JSONResponse({"object": "list", "data": models})

    async def _chat(self, http: Request) -> Response:
        session = self._session(http)
        body = await _read_body(http)
        call = session._add(self._read_request(body))
        leaving = asyncio.create_task(_wait_for_disconnect(http))
        ends: set[asyncio.Future[Any]] = {call.answer, leaving}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not call.answer.done():
                session._drop(call)
        if call.answer.cancelled():
            return Response(status_code=499)  # the client has left
        if (answer := call.answer.result()) is None:
            raise _ended_error()
        if body.get("stream"):
            with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return Response(event_stream(*answer, body.get("model"), with_usage), media_type="text/event-stream")
        # ASCII, because arguments that the model wrote may hold half of a surrogate pair
        return Response(json.dumps(chat_completion(*answer, body.get("model"))), media_type="application/json")

    def _session(self, http: Request) -> Session:
        """Return the session of a request's address, whose key the request must have."""
        if (session := self._sessions.get(http.path_params["id"])) is None:
            raise ApiError(404, "there is no such session, or it has ended")
        expected = f"Bearer {session.api_key}"
        if not secrets.compare_digest(http.headers.get("authorization", "").encode(), expected.encode()):
            raise ApiError(401, "the API key is not the session's", code="invalid_api_key")
        return session

    def _read_request(self, body: dict[str, Any]) -> AgentRequest:
        try:
            return agent_request(body, self.ignored)
        except ValueError as error:
            raise ApiError(400, str(error), str(error).partition(":")[0]) from error
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            raise ApiError(400, "messages or tools: expected the form of OpenAI's API", "messages") from error


class _Server(uvicorn.Server):
    """A server that leaves the process's signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _read_body(http: Request) -> dict[str, Any]:
    raw = bytearray()
    try:
        async for chunk in http.stream():
            raw += chunk
            if len(raw) > MAX_BODY_BYTES:
                raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        body = json.loads(raw)
    except ClientDisconnect as error:
        raise ApiError(400, "the connection broke") from error  # the client cannot read it
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


async def _wait_for_disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _ended_error() -> ApiError:
    return ApiError(410, "the session has ended")
