"""Talks to the evaluated model behind an OpenAI-compatible server, and can start and stop a vLLM server.

A vLLM server takes and returns token ids, so that a model with tools sees the same tokens as in training
(`ServerEngine`). Other servers take messages and return text (`ChatModel`).
"""

import asyncio
import ctypes
import itertools
import os
import resource
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from omegaconf import DictConfig
from openai import AsyncOpenAI, BadRequestError

from verl.workers.rollout.engines.interface import Generation, GenerationRequest, RolloutEngine
from verl.workers.rollout.tools.http_json import is_loopback
from verl_patches.master_ports import PORTS

ROOT = Path(__file__).resolve().parents[3]
START_SECONDS, STOP_SECONDS = 1800, 20
REQUEST_SECONDS, RETRIES = 3600, 5
CONNECTIONS_A_CLIENT = 16


def clients_of(url: str, api_key: str | None, concurrency: int) -> list[AsyncOpenAI]:
    """Return clients for `concurrency` concurrent requests to `url`, such as http://127.0.0.1:8000.

    Requests that are refused, cut off or answered by 408, 409, 429 or 5xx are repeated after waits that double. Proxies
    of the environment are used for other machines only. Each client has few connections, as httpcore (1.0) scans a
    pool's connections once for each idle one: with 256 in a pool that took half of an evaluation's time.
    """
    base, clients = httpx.URL(url.rstrip("/")), []
    for _ in range(-(-concurrency // CONNECTIONS_A_CLIENT)):
        http = httpx.AsyncClient(
            trust_env=not is_loopback(base), timeout=REQUEST_SECONDS, limits=httpx.Limits(max_connections=None)
        )
        client = AsyncOpenAI(base_url=f"{base}/v1", api_key=api_key or "none", max_retries=RETRIES, http_client=http)
        clients.append(client)
    return clients


# Where a request leaves these sampling parameters out, a server takes them from the model's generation_config.json. The
# values are those of training and validation. Only servers of the vLLM family accept the ones that OpenAI lacks.
NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
NEUTRAL_BEYOND_OPENAI = {"repetition_penalty": 1.0, "min_p": 0.0}
BEYOND_OPENAI = ("top_k", "repetition_penalty", "chat_template_kwargs")


class ServerEngine(RolloutEngine):
    """A `RolloutEngine` on a vLLM server: it takes and returns token ids, without log-probabilities. The clients from
    `clients_of` take turns. Requests beyond `concurrency` wait."""

    def __init__(self, clients: Sequence[AsyncOpenAI], model: str, concurrency: int, repetition_penalty: float = 1.0):
        self.clients, self.model, self.slots = itertools.cycle(clients), model, asyncio.Semaphore(concurrency)
        self.repetition_penalty = repetition_penalty

    async def generate(self, request: GenerationRequest) -> Generation:
        """Generate a continuation of token ids."""
        if request.n_top_logprobs or request.n_entropy:
            raise ValueError(
                f"n_top_logprobs={request.n_top_logprobs}, n_entropy={request.n_entropy}: the completions API reports "
                "none"
            )
        more = {"top_k": request.top_k, "stop_token_ids": list(request.stop_token_ids), "return_token_ids": True}
        more |= {"prompt": list(request.prompt_ids)} | ({"skip_special_tokens": False} if request.stop else {})
        more |= NEUTRAL | NEUTRAL_BEYOND_OPENAI | {"repetition_penalty": self.repetition_penalty}
        async with self.slots:
            completion = await next(self.clients).completions.create(
                model=self.model,
                prompt="",  # The prompt is in `more`, where the client does not validate every token.
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                seed=request.seed,
                stop=list(request.stop) or None,
                extra_body=more,
            )
        token_ids = (completion.choices[0].model_extra or {}).get("token_ids")
        if token_ids is None:
            raise ValueError(
                "the server gives no token ids: server.api=tokens needs a vLLM server, else server.api=chat"
            )
        stopped = bool(token_ids) and token_ids[-1] in set(request.stop_token_ids)
        return Generation(list(token_ids), [0.0] * len(token_ids), stopped=stopped)


class DoesNotFit(ValueError):
    """A prompt leaves no token of the context to a response."""


class ChatModel:
    """A model that takes messages and returns text.

    The limit of tokens is sent as max_completion_tokens, the only name of it that reasoning models of OpenAI know. The
    parameters in BEYOND_OPENAI, and neutral values in place of a generation_config.json's, are sent only if
    `beyond_openai`: the server knows vLLM's.
    """

    def __init__(self, clients: Sequence[AsyncOpenAI], model: str, concurrency: int, beyond_openai: bool = False):
        self.clients, self.model, self.slots = itertools.cycle(clients), model, asyncio.Semaphore(concurrency)
        self.beyond_openai = beyond_openai

    async def ask(self, messages: Sequence[dict], **sampling) -> tuple[str, int, bool]:
        """Return the reply's text, its number of tokens (0 if the server does not say), and whether a limit cut it.

        If prompt and max_tokens exceed the context, the reply may fill the context; DoesNotFit is raised if the
        messages alone fill it. Sampling parameters (also `chat_template_kwargs`) that are left out have no effect.
        """
        asked: dict[str, Any] = ({"top_p": 1.0} | NEUTRAL if self.beyond_openai else {}) | sampling
        beyond = {name: asked.pop(name) for name in BEYOND_OPENAI if name in asked}
        more = {"top_k": -1} | NEUTRAL_BEYOND_OPENAI | beyond if self.beyond_openai else None
        if "max_tokens" in asked:
            asked["max_completion_tokens"] = asked.pop("max_tokens")
        completion = None
        while completion is None:
            async with self.slots:
                try:
                    completion = await next(self.clients).chat.completions.create(
                        model=self.model, messages=list(messages), extra_body=more, **asked
                    )
                except BadRequestError as error:
                    if "context length" not in str(error) and error.code != "context_length_exceeded":
                        raise
                    if asked.pop("max_completion_tokens", None) is None:
                        raise DoesNotFit(str(error)) from error
        tokens = completion.usage.completion_tokens if completion.usage else 0
        text = completion.choices[0].message.content or ""
        # A model that stops within an emoji leaves half of a surrogate pair, which cannot be sent or written.
        return text.encode(errors="replace").decode(), tokens, completion.choices[0].finish_reason == "length"


SPARE_FILES = 256  # for the process itself, for tools and for connections to the judge


def visible_gpus() -> int | None:
    """Return the number of visible GPUs without initializing CUDA; None on the CPU profile, VERL_PLATFORM=cpu."""
    if os.environ.get("VERL_PLATFORM") == "cpu":
        return None
    import torch

    return torch.cuda.device_count()


def replicas_of(server: DictConfig, gpus: int | None) -> int:
    """Return `server.data_parallel`; if it is null, the number of replicas that the GPUs can hold, at least 1.

    vLLM (`--data-parallel-size`) gives each request to the replica with the fewest waiting and running requests. Every
    request has its sample's seed, so that it does not matter which one answers.
    """
    if server.data_parallel is not None:
        return server.data_parallel
    return 1 if gpus is None else max(1, gpus // server.tensor_parallel)


def gpu_problem(server: DictConfig, gpus: int | None) -> str | None:
    """Return why the server cannot start on this number of GPUs (None: the CPU profile); None if it can."""
    replicas = replicas_of(server, gpus)
    needed = server.tensor_parallel * replicas
    if gpus is None or needed <= gpus:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    return (
        f"server.tensor_parallel={server.tensor_parallel} x server.data_parallel={replicas}: GPUs needed: "
        f"{needed}, visible here: {gpus} (CUDA_VISIBLE_DEVICES: {visible}); lower them, or set server.url"
    )


def describe_server(server: DictConfig, gpus: int | None) -> str:
    """Return a line about the server that would be started, or about why it cannot start."""
    if problem := gpu_problem(server, gpus):
        return f"none can start: {problem}"
    replicas = replicas_of(server, gpus)
    devices = "the CPU" if gpus is None else f"{server.tensor_parallel * replicas} of {gpus} GPUs"
    return (
        f"data_parallel={replicas}, tensor_parallel={server.tensor_parallel} on {devices}, "
        f"{server.concurrency * replicas} requests at once"
    )


def allow_open_files(connections: int) -> None:
    """Raise this process's limit on open files if it is too low for this many connections, at most to the system's."""
    needed, (soft, hard) = connections + SPARE_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < needed:  # RLIM_INFINITY is -1
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard < 0 else min(needed, hard), hard))


def free_port() -> int:
    """Return a free port that no other socket gets by chance meanwhile."""
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as taken, suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port


@contextmanager
def serving(model: str, log: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """Run `vllm serve` for a folder or hub name on a free port of this machine, by `scripts/serve.sh`; yield its URL.
    When the block ends, the server and all processes that it started are ended."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = ["bash", str(ROOT / "scripts/serve.sh"), model, "--host", "127.0.0.1", "--port", str(port), *options]
    environment = {**os.environ, "HARDWARE": "cpu" if os.environ.get("VERL_PLATFORM") == "cpu" else "gpu"}
    own_session = {"cwd": ROOT, "env": environment, "start_new_session": True, "preexec_fn": _end_with_the_parent}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, **own_session)
    try:
        _wait_until_healthy(process, url, log)
        yield url
    finally:
        _stop(process)


def _end_with_the_parent() -> None:
    """Let this process, the server's, get a SIGTERM (Linux) when the evaluation is killed and cannot stop it."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _wait_until_healthy(process: subprocess.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while (code := process.poll()) is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", trust_env=False, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    reason = f"no answer in {START_SECONDS} s" if code is None else f"ended with exit code {code}"
    raise RuntimeError(f"the server did not start ({reason}); the end of {log}:\n{log.read_text()[-2000:]}")


def _stop(process: subprocess.Popen) -> None:
    """End all processes of the server's session: SIGTERM first, then SIGKILL for those that are left."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + STOP_SECONDS
        try:
            os.killpg(process.pid, signal_number)
            while time.monotonic() < deadline:
                process.poll()
                os.killpg(process.pid, 0)  # This raises when no process of the group is left.
                time.sleep(0.1)
        except ProcessLookupError:
            break
    process.wait()
