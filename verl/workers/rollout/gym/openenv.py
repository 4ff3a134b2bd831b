"""Environments on an OpenEnv server, by its own client (package `openenv-core`): one session for each instance.

An action is a text: the JSON object that the server takes, or the value of its only text field. An observation is the
server's text field, or else its JSON.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx

from verl.workers.rollout.stateful import Instance, InstanceLost, Step

SCHEMA_SECONDS = 30
FULL = "CAPACITY_REACHED"  # the server's code where all its sessions are taken
FIRST_WAIT, LONGEST_WAIT = 0.1, 2.0  # seconds between attempts to open a session, doubling
ABOUT = {"metadata", "done", "reward"}  # fields of every action and observation


def client_class() -> type:
    """Return OpenEnv's client; raise ValueError if the package is not installed."""
    try:
        from openenv.core.generic_client import GenericEnvClient
    except ImportError as error:
        raise ValueError(f"environment.url needs openenv-core: pip install '.[openenv]' ({error})") from error
    return GenericEnvClient


async def text_fields(url: str) -> tuple[str | None, str | None]:
    """Ask a server for the names of the only text field of its actions, and of its observations; None if there is none,
    or several.

    Raises:
        ValueError: there is no such server.
    """
    try:
        async with httpx.AsyncClient(timeout=SCHEMA_SECONDS) as client:
            reply = await client.get(f"{url.rstrip('/')}/schema")
        schemas = reply.raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        raise ValueError(f"environment.url={url}: no OpenEnv server answers there: {error!r}") from error
    action, observation = (_text_field(schemas.get(name) or {}) for name in ("action", "observation"))
    return action, observation


def _text_field(schema: Mapping[str, Any]) -> str | None:
    properties = {name: about for name, about in (schema.get("properties") or {}).items() if name not in ABOUT}
    texts = [name for name, about in properties.items() if about.get("type") == "string"]
    return texts[0] if len(texts) == 1 else None


class OpenEnvServer:
    """A server; its sessions cannot copy themselves."""

    can_copy = False

    def __init__(self, url: str):
        self.url = url
        self.fields: tuple[str | None, str | None] | None = None

    def instance(self, task: Mapping[str, Any] | None, seed: int) -> "OpenEnvInstance":
        return OpenEnvInstance(self, task, seed)

    async def start(self) -> None:
        """Ask the server for its text fields, once."""
        if self.fields is None:
            self.fields = await text_fields(self.url)

    async def stop(self) -> None:
        """End nothing: the server is the user's."""


class OpenEnvInstance(Instance):
    """A session on a server.

    Args:
        task: object whose fields go to the server's `reset`, beside the seed.
    """

    def __init__(self, server: OpenEnvServer, task: Mapping[str, Any] | None, seed: int):
        self.client = client_class()(base_url=server.url, message_timeout_s=1e6)  # the caller limits the time
        self.server, self.task, self.seed = server, dict(task or {}), seed

    async def prepare(self) -> None:
        await self.server.start()
        self.action_field, self.observation_field = self.server.fields or (None, None)

    async def reset(self) -> str:
        wait = FIRST_WAIT
        while True:  # until the caller gives up
            try:
                result = await self._answer(self.client.reset(**self.task, seed=self.seed))
                return self._text(result.observation)
            except RuntimeError as error:
                if FULL not in str(error):
                    raise
            await self.client.disconnect()
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    async def step(self, action: str) -> Step:
        result = await self._answer(self.client.step(self._action(action)))
        return Step(self._text(result.observation), result.reward and float(result.reward), bool(result.done))

    async def _answer(self, call) -> Any:
        try:
            return await call
        except RuntimeError:  # the server's own error
            raise
        except Exception as error:
            self.is_lost = True
            raise InstanceLost(f"the server has ended the session: {error!r}") from error

    def _action(self, text: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return value
        if self.action_field is None:
            raise RuntimeError("the action is no JSON object, and the server's actions have not one text field")
        return {self.action_field: text}

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self.observation_field is not None:
            return str(observation.get(self.observation_field, ""))
        return json.dumps({k: v for k, v in observation.items() if k not in ABOUT}, ensure_ascii=False)

    async def close(self) -> None:
        await self.client.disconnect()
