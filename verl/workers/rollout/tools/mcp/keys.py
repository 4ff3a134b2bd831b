"""The parameters of an MCP server: how to reach it, which of its tools the model gets, and what its calls may do."""

import os
import re
import shutil
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as keys_dataclass

from verl.workers.config.keys import STRICT
from verl.workers.rollout.tools.http_json import checked_url, is_loopback

Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
CALLS_AT_ONCE = {"stdio": 1, "http": 16}  # defaults


@keys_dataclass(frozen=True, config=STRICT)
class MCPKeys:
    """Keys under `params` of an entry of `tool_instances`.

    Args:
        command: program and arguments of a server that talks over its standard input and output.
        url: address of a server that speaks streamable HTTP, instead of a command.
        tools: names of the server's tools that the model may call; None for all.
        prefix: beginning of all tags, `<prefix>_<name>`; empty for tags that are the tools' names.
        session: `shared`: one connection for all trajectories of a process, for a server without state. `trajectory`:
            each trajectory has a connection of its own, and with a command a process of its own.
        allow_repeated_calls: whether the calls of a trajectory's session may be made again for further branches, also
            of tools that are neither readOnlyHint nor idempotentHint.
        calls_at_once: largest number of calls in flight on a connection; None for 1 with a command, 16 with an address.
        pass_env: names of environment variables that the command gets beside HOME, LOGNAME, PATH, SHELL, TERM, USER.
        api_key_env: name of the environment variable with the key that the address gets as bearer token.
        headers_env: header -> name of the environment variable with its value, for the address.
        request_timeout: time limit of one call, in seconds; the tool box's time limit applies too.
        start_timeout: time limit for starting the command, or reaching the address, in seconds.
    """

    command: Texts | None = None
    url: str | None = None
    tools: Texts | None = None
    prefix: str = Field(default="", pattern=r"^[\w-]*$")
    session: Literal["shared", "trajectory"] = "shared"
    allow_repeated_calls: bool = False
    calls_at_once: int | None = Field(default=None, ge=1)
    pass_env: list[str] = Field(default_factory=list)
    api_key_env: str | None = None
    headers_env: dict[str, str] = Field(default_factory=dict)
    request_timeout: float = Field(default=60, gt=0)
    start_timeout: float = Field(default=60, gt=0)

    def __post_init__(self):
        if (self.command is None) == (self.url is None):
            raise ValueError(f"command or url: expected one of them, got {self.command} and {self.url}")
        if self.command is not None and shutil.which(self.command[0]) is None:
            raise ValueError(f"command: there is no program {self.command[0]}")
        self._check_variables()

    def _check_variables(self) -> None:
        """Check the environment variables and who is sent them. No message has a variable's value."""
        secrets = {"api_key_env": [self.api_key_env] * bool(self.api_key_env), "headers_env": self.headers_env.values()}
        for key, names in {"pass_env": self.pass_env, **secrets}.items():
            for name in names:
                if name not in os.environ:
                    raise ValueError(f"{key}: the environment variable {name} is not set")
                if key != "pass_env" and not re.fullmatch(r"[!-~]([ -~]*[!-~])?", os.environ[name]):
                    raise ValueError(f"{key}: the value of the environment variable {name} cannot be sent in a header")
        for header in self.headers_env:
            is_twice = self.api_key_env and header.lower() == "authorization"
            if not re.fullmatch(r"[\w-]+", header, re.ASCII) or is_twice:
                raise ValueError(f"headers_env.{header}: no name of a header, or one that api_key_env sets")
        for key, names in secrets.items():
            if names and self.command is not None:
                raise ValueError(f"{key} is for a server with url; name the variables of a command in pass_env")
        if self.url is not None:
            address = checked_url(self.url, "url")
            if address.scheme != "https" and not is_loopback(address) and any(secrets.values()):
                raise ValueError(f"url must be https, since it is sent the values of variables, got {self.url!r}")

    def headers(self) -> dict[str, str]:
        """Return the headers that the environment variables hold."""
        headers = {name: os.environ[variable] for name, variable in self.headers_env.items()}
        return headers | ({"Authorization": f"Bearer {os.environ[self.api_key_env]}"} if self.api_key_env else {})

    def max_calls(self) -> int:
        return self.calls_at_once or CALLS_AT_ONCE["http" if self.command is None else "stdio"]
