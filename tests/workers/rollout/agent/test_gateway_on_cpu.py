"""The gateway by OpenAI's own client and by raw HTTP: replies, streams, refusals, and clients that leave."""

import asyncio
import contextlib
import json
import signal
import time

import httpx
import openai
import pytest

from verl.workers.rollout.agent.chat_completions import agent_request
from verl.workers.rollout.agent.gateway import MAX_BODY_BYTES, Gateway, Reply, Session

CALLS = Reply("", (("add", '{"a": 1}'), ("add", '{"a": 2}')), "tool_calls", 7, 5)


@contextlib.asynccontextmanager
async def running_gateway(**kwargs):
    gateway = Gateway(**kwargs)
    await asyncio.gather(gateway.start(), gateway.start())
    try:
        async with asyncio.timeout(30):
            yield gateway
    finally:
        await gateway.stop()


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def ask(session: Session, text: str = "hi", client: httpx.AsyncClient | None = None, **parameters) -> asyncio.Task:
    """Return a task of the response to a request by OpenAI's client."""
    program = openai.AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key, max_retries=0, http_client=client, timeout=20
    )
    return asyncio.create_task(program.chat.completions.create(model="m", messages=user(text), **parameters))


async def post(session: Session, body, key: str | None = None, url: str | None = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key or session.api_key}"}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(timeout=20) as client:
        return await client.post(f"{url or session.base_url}/chat/completions", content=data, headers=headers)


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def test_replies_with_text_and_calls():
    async with running_gateway() as gateway:
        session = gateway.open()
        response = ask(session, tools=[{"type": "function", "function": {"name": "add"}}], stop="end", max_tokens=9)
        request = await session.next_request()
        assert (request.messages, request.stop, request.max_tokens) == (tuple(user("hi")), ("end",), 9)
        session.reply(request, CALLS)
        completion = await response
        choice = completion.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert [(c.id, c.function.arguments) for c in choice.message.tool_calls] == [
            ("call_1_0", '{"a": 1}'),
            ("call_1_1", '{"a": 2}'),
        ]
        assert (completion.id, completion.model, completion.usage.total_tokens) == ("chatcmpl-1", "m", 12)
        response = ask(session, "more")
        session.reply(await session.next_request(), Reply("grüß \ud83d", finish_reason="length"))
        choice = (await response).choices[0]
        assert (choice.message.content, choice.message.tool_calls) == ("grüß \ud83d", None)
        assert (choice.finish_reason, session.n_requests) == ("length", 2)
        with pytest.raises(ValueError, match="no reply yet"):
            session.reply(request, CALLS)


@pytest.mark.parametrize("reply", [CALLS, Reply("four", prompt_tokens=2, completion_tokens=1)])
async def test_streams_add_up_to_the_reply(reply):
    async with running_gateway() as gateway:
        session = gateway.open()
        response = ask(session, stream=True, stream_options={"include_usage": True})
        session.reply(await session.next_request(), reply)
        chunks = [chunk async for chunk in await response]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == reply.content
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert [call.index for call in calls] == list(range(len(calls)))
        assert tuple((call.function.name, call.function.arguments) for call in calls) == reply.tool_calls
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-2:] == [None, reply.finish_reason]
        assert chunks[-1].usage.total_tokens == reply.prompt_tokens + reply.completion_tokens


async def test_requests_are_answered_in_any_order_and_equal_ones_by_arrival():
    async with running_gateway(ignored=[r"\d+:\d+"]) as gateway:
        session = gateway.open()
        responses = []
        for number, text in enumerate(["a 10:30", "b", "a 11:45"]):
            responses.append(ask(session, text))
            await until(lambda number=number: session.n_requests == number + 1)
        assert len(session.requests) == 3
        b = agent_request({"messages": user("b")})
        assert await session.next_request(b) == b
        session.reply(b, Reply("to b"))
        first, second = await session.next_request(), await session.next_request()
        assert first == second  # without the time
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.next_request(b), 0.01)
        session.reply(second, Reply("first"))
        session.reply(first, Reply("second"))
        answers = [(await response).choices[0].message.content for response in responses]
        assert answers == ["first", "to b", "second"]
        # a wait for one request leaves another to others, and a canceled wait takes none
        waits = [asyncio.create_task(session.next_request(b)), asyncio.create_task(session.next_request())]
        response = ask(session, "c")
        assert (await waits[1]).messages == tuple(user("c"))
        waits[0].cancel()
        late = ask(session, "b")
        session.reply(await session.next_request(b), Reply(""))
        assert (await late).choices[0].message.content == ""
        response.cancel()


REFUSED = [
    ("n", 2),
    ("logprobs", True),
    ("response_format", {"type": "json_object"}),
    ("max_tokens", "9"),
    ("stop", [""]),
    ("tools", [{"type": "custom", "custom": {"name": "x"}}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"id": "1"}]}]),
    ("messages", []),
]


async def test_refused_parameters_are_named_and_others_ignored():
    async with running_gateway() as gateway:
        session = gateway.open()
        taken = {"n": 1, "response_format": {"type": "text"}, "logprobs": None}
        ignored = {"temperature": 0.5, "seed": 1, "logit_bias": {}, "new": 1, "tool_choice": "required"}
        response = asyncio.create_task(post(session, {"messages": user("hi")} | taken | ignored))
        session.reply(await session.next_request(), Reply("ok"))
        assert (await response).status_code == 200
        for name, value in REFUSED:
            response = await post(session, {"messages": user("hi"), name: value})
            error = response.json()["error"]
            assert (response.status_code, error["param"], session.n_requests) == (400, name, 1)
            assert set(error) == {"message", "type", "param", "code"} and name in error["message"]


async def test_errors_of_access_and_form():
    async with running_gateway() as gateway:
        session, other, body = gateway.open(), gateway.open(), {"messages": user("hi")}
        unknown = session.base_url.replace("/s/", "/s/x")
        assert (await post(session, body, key=other.api_key)).json()["error"]["code"] == "invalid_api_key"
        responses = [
            await post(session, body, key=other.api_key),
            await post(session, body, url=unknown),
            await post(session, body, url=f"{session.base_url}/v2"),
            await post(session, b'{"messages": '),
            await post(session, b"[]"),
            await post(session, b"[" * 100_000),
            await post(session, b" " * (MAX_BODY_BYTES + 1)),
        ]
        assert [response.status_code for response in responses] == [401, 404, 404, 400, 400, 400, 413]
        assert all(response.json()["error"]["message"] for response in responses)
        program = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
        assert [model.id async for model in program.models.list()] == ["model"]
        # at the end of a session its waiting requests and calls end too
        pending, handed_out = ask(session, "a"), ask(session, "b")
        await session.next_request(agent_request({"messages": user("b")}))
        waiting = asyncio.create_task(session.next_request(agent_request({"messages": user("c")})))
        await until(lambda: session.n_requests == 2)
        session.close()
        session.close()
        for response, status in ((pending, 410), (handed_out, 410), (ask(session, "later"), 404)):
            with pytest.raises(openai.APIStatusError, match="has ended") as error:
                await response
            assert error.value.status_code == status
        for call in (waiting, session.next_request()):
            with pytest.raises(RuntimeError, match="the session is closed"):
                await call
        last = ask(other)
        await other.next_request()
        await gateway.stop()
        with pytest.raises(openai.APIStatusError, match="ended"):
            await last
        with pytest.raises(RuntimeError, match="not started"):
            gateway.open()
        await gateway.start()
        assert gateway.open().base_url.startswith("http://127.0.0.1:")


async def test_clients_that_leave():
    async with running_gateway() as gateway:
        session = gateway.open()
        pending, handed_out = ask(session, "a"), ask(session, "b")
        request = await session.next_request(agent_request({"messages": user("b")}))
        await until(lambda: len(session.requests) == 1)
        pending.cancel()
        await until(lambda: not session.requests)
        handed_out.cancel()
        await asyncio.gather(handed_out, return_exceptions=True)
        session.reply(request, Reply("dropped"))
        response = ask(session, "b")
        session.reply(await session.next_request(request), Reply("kept"))
        assert (await response).choices[0].message.content == "kept"


async def test_two_runs_give_equal_bytes():
    runs = [], []
    for bodies in runs:
        async with running_gateway() as gateway:
            session = gateway.open()
            for stream in (False, True):
                response = asyncio.create_task(post(session, {"messages": user("hi"), "stream": stream}))
                session.reply(await session.next_request(), CALLS)
                bodies.append(((await response).content, dict((await response).headers)))
    assert runs[0] == runs[1]


async def test_many_sessions_lose_nothing_and_turns_do_not_wait_for_delayed_acks():
    async def program(session, client) -> float:
        """Return the time of the fastest of the later turns."""
        seconds = []
        for turn in range(30):
            started = time.monotonic()
            response = ask(session, f"{session.api_key} {turn}", client)
            request = await session.next_request()
            session.reply(request, Reply(request.messages[-1]["content"][::-1]))
            assert (await response).choices[0].message.content[::-1] == f"{session.api_key} {turn}"
            seconds.append(time.monotonic() - started)
        return min(seconds[15:])

    async with running_gateway() as gateway, openai.DefaultAsyncHttpxClient() as client:
        assert await program(gateway.open(), client) < 0.03  # a delayed ACK takes 0.04
        await asyncio.gather(*(program(gateway.open(), client) for _ in range(16)))


async def test_second_gateway_and_no_change_of_signals():
    def handlers():
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    before, first, second = handlers(), Gateway(), Gateway()
    await asyncio.gather(first.start(), second.start())
    assert handlers() == before
    session = second.open()
    ports = [gateway.open().base_url.split("/")[2] for gateway in (second, first)]
    assert (await post(session, {}, url=session.base_url.replace(*ports))).status_code == 404
    await asyncio.gather(first.stop(), second.stop(), first.stop())
    with pytest.raises(OSError):
        await Gateway("192.0.2.1").start()
