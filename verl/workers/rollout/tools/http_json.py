"""JSON requests over HTTP for tools: every outcome is a JSON value or a ToolError.

| outcome                            | kind          | retry |
|------------------------------------|---------------|-------|
| no server listens, no such host    | `unreachable` | yes   |
| no whole reply in time             | `timeout`     | yes   |
| the connection breaks              | `cut_off`     | yes   |
| status 408, 429, 5xx               | `http_<n>`    | yes   |
| any other 4xx                      | `http_<n>`    | no    |
| 3xx: never followed                | `redirect`    | no    |
| more than 8 MB                     | `oversized`   | no    |
| not JSON                           | `bad_reply`   | yes   |
"""

import asyncio
import ipaddress
import json
from typing import Any

import httpx

from verl.workers.rollout.tools.base_tool import ToolError

PASSING_STATUS = (408, 429)
MAX_REPLY_BYTES = 8_000_000


def json_client(url: httpx.URL, headers: dict[str, str] | None = None) -> httpx.AsyncClient:
    """Return a client for `post_json` to `url`. It uses the environment's proxies unless the URL is on this machine."""
    return httpx.AsyncClient(
        # uncompressed, so that the limit on received bytes limits the reply's size
        headers={"Accept": "application/json", "Accept-Encoding": "identity"} | (headers or {}),
        follow_redirects=False,
        trust_env=not is_loopback(url),
        timeout=None,  # `post_json` has one time limit for the whole request
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
    )


def checked_url(text: str, key: str) -> httpx.URL:
    """Return the address of an HTTP server as a URL; a ValueError for another text names the config key."""
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, TypeError) as error:
        raise ValueError(f"{key}: {text!r}: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{key} must begin with http:// or https:// and name a host, got {text!r}")
    return url


def is_loopback(url: httpx.URL) -> bool:
    try:
        return ipaddress.ip_address(url.host).is_loopback
    except ValueError:
        return url.host == "localhost"


async def post_json(client: httpx.AsyncClient, url: httpx.URL, payload: dict, *, timeout: float, server: str) -> Any:
    """Post `payload` and return the reply's JSON value, within `timeout` seconds. A failure is a ToolError of the
    module's table; its message names the server as `server`, and has no part of the request: no key, no address."""
    try:
        body = await asyncio.wait_for(_post(client, url, payload, server), timeout)
    except asyncio.TimeoutError:
        fault = ToolError(f"{server} did not answer within {timeout:g} s", kind="timeout", retry=True)
    except httpx.ConnectError:
        fault = ToolError(f"{server} cannot be reached", kind="unreachable", retry=True)
    except httpx.HTTPError:
        fault = ToolError(f"{server} broke off in the middle", kind="cut_off", retry=True)
    else:
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            fault = ToolError(f"{server} sent an unreadable reply", kind="bad_reply", retry=True)
    # It is raised here, because a handler would add httpx's error, which holds the request and the key, as __context__.
    raise fault


async def _post(client: httpx.AsyncClient, url: httpx.URL, payload: dict, server: str) -> bytes:
    async with client.stream("POST", url, json=payload) as response:
        status = response.status_code
        if 300 <= status < 400:
            message = f"{server} pointed elsewhere, which is not followed"
            raise ToolError(message, kind="redirect", retry=False, own_fault=True)
        if status != 200:
            passing = status in PASSING_STATUS or status >= 500
            message = f"{server} refused: HTTP status {status}"
            raise ToolError(message, kind=f"http_{status}", retry=passing, own_fault=True)
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > MAX_REPLY_BYTES:
                raise ToolError(f"{server} sent too long a reply", kind="oversized", retry=False, own_fault=True)
        return bytes(body)
