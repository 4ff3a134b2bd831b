"""Environments on an OpenEnv server: a session for each instance, by the server's messages (OpenEnv 0.3).

An action is a text: the JSON object that the server takes, or the value of its only text field. An observation is the
server's text field, or else its JSON.
"""

import asyncio
import contextlib
import json
import math
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, Literal

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from verl.workers.rollout.stateful import Instance, InstanceLost, Step, result_in_time
from verl.workers.rollout.tools.http_json import is_loopback

SCHEMA_SECONDS = 30
FIRST_WAIT, LONGEST_WAIT = 0.05, 1.0  # seconds between attempts to open a session, doubling
SHARED_FIELDS = {"metadata", "done", "reward"}  # fields of every action and observation


class ServerDown(ConnectionError):
    """Nothing answers at the address."""


class ServerError(RuntimeError):
    """The server's answer to a message is an error, with this code and text."""

    def __init__(self, code: str, text: str):
        super().__init__(f"{text} ({code})")
        self.code, self.text = code, text


def own_fields(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a server's actions or observations that not all servers have, with their schemas."""
    return {name: field for name, field in (schema.get("properties") or {}).items() if name not in SHARED_FIELDS}


def text_field(fields: Mapping[str, Any]) -> str | None:
    """Return the name of the only text field; None if there is none, or several."""
    texts = [name for name, field in fields.items() if field.get("type") == "string"]
    return texts[0] if len(texts) == 1 else None


class OpenEnvServer:
    """A server; its sessions cannot copy themselves. `seconds` is the time limit for the opening of a session, and for
    the server to be started again."""

    can_copy = False

    def __init__(self, url: str, seconds: float):
        self.url, self.seconds = url.rstrip("/"), seconds
        self.is_loopback = is_loopback(httpx.URL(url))
        self.action_fields: dict[str, Any] = {}  # name -> schema
        self.observation_fields: dict[str, Any] = {}
        self.next_session = asyncio.Lock()  # held by the first of those that wait for a session
        self.down_since = math.inf  # monotonic time since which nothing answers

    def instance(self, task: Mapping[str, Any] | None, seed: int) -> "OpenEnvInstance":
        return OpenEnvInstance(self, task, seed)

    async def connect(self) -> ClientConnection:
        """Return a connection, for which the server opens a session if it has one to give. Raise ServerDown if none
        answers, and ValueError if what answers is no OpenEnv server."""
        proxy: Literal[True] | None = None if self.is_loopback else True
        try:
            if not self.action_fields:
                await self._read_schema()
            return await connect(f"ws{self.url.removeprefix('http')}/ws", max_size=None, proxy=proxy)
        except (httpx.HTTPError, OSError, WebSocketException) as error:
            raise ServerDown(f"no OpenEnv server answers at {self.url}: {error!r}") from error

    async def _read_schema(self) -> None:
        async with httpx.AsyncClient(timeout=SCHEMA_SECONDS, trust_env=not self.is_loopback) as client:
            reply = (await client.get(f"{self.url}/schema")).raise_for_status()
        try:
            schemas = reply.json()
            self.observation_fields = own_fields(schemas["observation"])
            self.action_fields = own_fields(schemas["action"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"environment.url={self.url}: {reply.text!r:.100} is no schema of OpenEnv") from error

    async def stop(self) -> None:
        """End nothing: the server is the user's."""


class OpenEnvInstance(Instance):
    """A session on a server. `task` has fields for its `reset`; a seed among them takes the place of `seed`."""

    def __init__(self, server: OpenEnvServer, task: Mapping[str, Any] | None, seed: int):
        if not isinstance(task, Mapping | None):
            raise ValueError(f"extra_info.environment={task!r:.200}: an OpenEnv server takes an object")
        self.server, self.task = server, {"seed": seed, **(task or {})}
        self.connection: ClientConnection | None = None

    async def prepare(self, make_room: Callable[[Exception], None]) -> None:
        if not self.server.next_session.locked() and await self._refusal() is None:
            return
        async with self.server.next_session:
            wait = FIRST_WAIT
            while (refusal := await self._refusal()) is not None:
                if monotonic() > self.server.down_since + self.server.seconds:
                    raise refusal
                make_room(refusal)
                await asyncio.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)

    async def _refusal(self) -> Exception | None:
        """Open a session and return None; or return the reason why another attempt may succeed."""
        is_open = False
        try:
            self.connection = await self.server.connect()
            await result_in_time(self._answer({"type": "state"}), self.server.seconds)
            is_open, self.is_lost = True, False
        except (ServerDown, InstanceLost) as error:
            self.server.down_since = min(self.server.down_since, monotonic())
            return error
        except ServerError as error:
            is_open, full = error.code == "EXECUTION_ERROR", error  # the state's, which nobody needs
            if not is_open and error.code != "CAPACITY_REACHED":
                raise
        finally:
            if not is_open:
                await self.close()
        self.server.down_since = math.inf
        return None if is_open else full

    async def reset(self, recorded: str | None = None) -> str:
        return self._step(await self._answer({"type": "reset", "data": self.task})).observation

    async def step(self, action: str, recorded: Step | None = None) -> Step:
        try:
            return self._step(await self._answer({"type": "step", "data": self._action(action)}))
        except ServerError as error:
            if error.code != "VALIDATION_ERROR":
                raise
            return Step(f"Error: {error.text}")  # the environment has not seen the action

    def _action(self, text: str) -> dict[str, Any]:
        """Return the object for an action's text; raise ServerError for another text where actions have many fields."""
        field, value = text_field(self.server.action_fields), None
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(text)
        if isinstance(value, dict) and (field is None or field in value):
            return value
        if field is None:
            names = ", ".join(self.server.action_fields)
            raise ServerError("VALIDATION_ERROR", f"write your action as a JSON object with {names}")
        return {field: text}

    async def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the data of the server's answer; raise ServerError, or InstanceLost if the session has ended."""
        assert self.connection is not None
        try:
            with contextlib.suppress(ConnectionClosed):  # the server's reason may have come before
                await self.connection.send(json.dumps(message))
            reply = json.loads(await self.connection.recv())
        except ConnectionClosed as error:
            self.is_lost = True
            raise InstanceLost(f"the server has ended the session: {error}") from error
        data = reply.get("data") or {}
        if reply["type"] == "error":
            faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in data.get("errors", ()))
            raise ServerError(data["code"], "; ".join(faults) or data["message"])
        return data

    def _step(self, data: Mapping[str, Any]) -> Step:
        observation, reward = data["observation"], data["reward"]
        if (field := text_field(self.server.observation_fields)) is not None:
            text = str(observation.get(field, ""))
        else:
            text = json.dumps(observation, ensure_ascii=False)
        return Step(text, None if reward is None else float(reward), bool(data["done"]))

    async def close(self) -> None:
        if self.connection is not None:
            await self.connection.close()
