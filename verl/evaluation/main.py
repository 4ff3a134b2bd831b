"""Runs an evaluation from its config to its log; see scripts/evaluate.py and recipe/common/config/evaluate.yaml."""

import asyncio
import hashlib
import os
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import httpx
import pyarrow.parquet as pq
from annotated_types import Ge, Gt, Le, MinLen
from omegaconf import DictConfig, OmegaConf
from openai import AsyncOpenAI

from verl.evaluation.model.checkpoint import Checkpoint, find_checkpoint, fingerprint, write_model_folder
from verl.evaluation.model.server import (
    ChatModel,
    ServerEngine,
    allow_open_files,
    clients_of,
    describe_server,
    gpu_problem,
    replicas_of,
    serving,
    visible_gpus,
)
from verl.evaluation.questions.benchmarks import find_benchmark
from verl.evaluation.questions.loading import QuestionSet, read_questions
from verl.evaluation.run import Responder, Scorer, chat_responder, collect, missing, token_responder
from verl.evaluation.scores.judge import Judge
from verl.evaluation.scores.metrics import measure
from verl.evaluation.scores.results import EvalResult, format_result
from verl.evaluation.scores.sample_file import SampleFile
from verl.evaluation.scores.scoring import ENVIRONMENT, find_scoring
from verl.evaluation.settings import (
    EnvironmentChoice,
    chat_template_kwargs,
    environment_choice,
    prompt_style,
    sampling_of,
)
from verl.trainer.checks.preflight import check_model_path
from verl.trainer.checks.values import check_kinds
from verl.utils.atomic_files import replacing
from verl.workers.config.keys import read_keys
from verl.workers.rollout.chat.calls import CallReader
from verl.workers.rollout.chat.environment import Chat
from verl.workers.rollout.chat.template import ChatTemplate, builder_of_model
from verl.workers.rollout.contexts import ContextRule
from verl.workers.rollout.engines.interface import end_of_sequence_ids
from verl.workers.rollout.environment import NO_ENVIRONMENT, Environment
from verl.workers.rollout.gym.environment import Gym, GymKeys
from verl.workers.rollout.run_environment import try_gym
from verl.workers.rollout.tools.environment import Tools
from verl.workers.rollout.tools.http_json import is_loopback
from verl.workers.rollout.tools.protocol import Protocol
from verl.workers.rollout.tools.tool_box import ToolBox, ToolsConfig, tool_class

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
# settings on which the samples do not depend, and settings that `settings_of` replaces
NOT_ASKED = ("output_dir", "ks", "server", "judge", "step", "model", "experiment", "limit", "skip_missing", "n")
KINDS: dict[Any, str] = {
    Annotated[int, Ge(1)]: "n max_tokens server.tensor_parallel server.concurrency judge.concurrency",
    Annotated[int, Ge(1)] | None: "server.data_parallel limit",
    Annotated[list[Annotated[int, Ge(1)]], MinLen(1)]: "ks",
    Annotated[float, Gt(0), Le(1)]: "top_p",
    Annotated[float, Gt(0)]: "repetition_penalty",
    Annotated[float, Ge(0)]: "temperature",
    Annotated[int, Ge(-1)]: "top_k",
    Annotated[int, Ge(0), Le(2**32 - 1)]: "seed",
    Literal["tokens", "chat"]: "server.api",
}


class EvaluationError(ValueError):
    """The evaluation cannot be made; the message names the key and says what to do."""


@contextmanager
def _as_evaluation_error():
    try:
        yield
    except (ValueError, TypeError) as error:
        raise EvaluationError(str(error)) from error


class Plan(NamedTuple):
    """An evaluation on a benchmark whose config and files have been checked."""

    config: DictConfig
    checkpoint: Checkpoint | None  # None for the model of the server `server.url`
    questions: QuestionSet
    scoring: str
    tools: ToolsConfig | None  # None if the model has no tools
    environment: EnvironmentChoice
    prompt: str  # style of the prompts in words, from `prompt_style`
    template: dict  # `apply_chat_template_kwargs`

    @property
    def reported(self) -> dict:
        """The settings that a result line names, in JSON's types."""
        config, scoring, environment = self.config, self.scoring, self.environment.about
        judge = (config.judge.name or config.judge.url) if scoring == "judge" else "none"
        settings = sampling_of(config) | {"seed": config.seed, "prompt": self.prompt}
        settings |= {"apply_chat_template_kwargs": self.template, "tools": sorted(config.tools.tool_instances)}
        how = {"environment": environment} if environment != "tools" else {}
        return settings | {"scoring": scoring, "judge": judge} | how

    @property
    def step(self) -> int | None:
        return self.checkpoint.step if self.checkpoint else None

    @property
    def path(self) -> Path:
        """The path of the samples' file."""
        folder = Path(self.config.output_dir) / str(self.config.experiment)
        folder = folder if self.step is None else folder / f"step_{self.step}"
        return folder / f"{self.config.benchmark}.jsonl"

    @property
    def requests_at_once(self) -> int:
        """The number of concurrent requests: `server.concurrency`, times the replicas of a server started here."""
        server = self.config.server
        return server.concurrency * (replicas_of(server, visible_gpus()) if server.url is None else 1)

    def describe(self) -> list[str]:
        config, (benchmark, questions, left_out) = self.config, self.questions
        lines = [f"model: {self.checkpoint.model if self.checkpoint else config.server.url}"]
        if self.checkpoint and self.checkpoint.shards:
            lines.append(f"merged first, from: {self.checkpoint.shards}")
        if config.server.url is None:
            lines.append(f"server: {describe_server(config.server, visible_gpus())}")
        out = "".join(f", {count} left out ({why})" for why, count in left_out.items())
        counts = f"{len(questions)} questions x {config.n} = {len(questions) * config.n} responses{out}"
        lines += [f"data: {benchmark.title}, {counts}", f"scored by: {find_scoring(self.scoring).about}"]
        if self.tools:
            how = f"environment={self.environment.about}, {self.tools.call_limit} calls a response"
            lines.append(f"tools: {', '.join(self.tools.tool_instances)}, {how}")
        if keys := self.environment.keys:
            lines.append(f"environment=gym: {keys.class_path or keys.url}, {keys.max_steps} actions a response")
        sampling = {"n": config.n} | sampling_of(config) | {"seed": config.seed}
        lines.append("sampling: " + ", ".join(f"{name}={value}" for name, value in sampling.items()))
        return [*lines, f"prompt: {self.prompt}; apply_chat_template_kwargs={self.template}"]


@_as_evaluation_error()
def plan_of(config: DictConfig) -> Plan:
    """Read and check everything that can be checked before a server starts; an EvaluationError says what is wrong."""
    scoring = config.scoring or find_benchmark(config.benchmark).scoring
    _check_keys(config, scoring)
    tools = read_keys(ToolsConfig, config.tools, "actor_rollout_ref.rollout.tools")
    instances = tools.tool_instances
    loaded = [tool_class(name, instance) for name, instance in instances.items()]
    checkpoint = _checkpoint(config)
    environment = environment_choice(config, checkpoint, find_benchmark(config.benchmark).scoring == ENVIRONMENT)
    # the chat template describes the tools itself
    tool_tags = [tag for cls, params in loaded for tag in cls.tags(**params)] if environment.name == "tools" else []
    questions = read_questions(
        config.benchmark, _files(config), style=config.style, tool_tags=tool_tags, system=config.system
    )
    questions = questions._replace(questions=questions.questions[: config.limit])
    prompt, template = prompt_style(config, questions, tool_tags), chat_template_kwargs(config, checkpoint)
    if environment.keys is not None and environment.keys.reward != "task":
        scoring = ENVIRONMENT
    elif scoring == ENVIRONMENT:
        raise ValueError(f"scoring={scoring} needs environment=gym, with environment.reward other than task")
    if environment.keys is not None:
        _check_gym(config, environment.keys, questions)
    tools = tools if instances else None
    return Plan(config, checkpoint, questions, scoring, tools, environment, prompt, template)


def _check_gym(config: DictConfig, keys: GymKeys, questions: QuestionSet) -> None:
    """Check that the evaluation's other keys fit environment=gym, and reset it for the first question."""
    for key, is_set in {
        f"stop={list(config.stop)}": bool(config.stop),
        f"tools={', '.join(config.tools.tool_instances)}": bool(config.tools.tool_instances),
        f"server.api={config.server.api}": config.server.api != "tokens",
    }.items():
        if is_set:
            raise ValueError(f"{key} with environment=gym, which answers the model's turns in tokens: leave it out")
    try_gym(keys, questions.questions[0].task)


def _checkpoint(config: DictConfig) -> Checkpoint | None:
    if config.model is not None:
        check_model_path("model", config.model)
        return Checkpoint(config.model, None)
    return find_checkpoint(config.experiment, config.step) if config.server.url is None else None


def _check_keys(config: DictConfig, scoring: str) -> None:
    find_scoring(scoring)  # This raises for an unknown one.
    check_kinds(config, KINDS)
    if config.temperature == 0 and config.n > 1:
        raise ValueError(f"temperature=0 with n={config.n}: equal samples; expected more than 0")
    if config.stop and config.tools.tool_instances:
        raise ValueError(f"stop={list(config.stop)} with tools: the tools' closing tags stop the model; leave it at []")
    if not all(k <= config.n for k in config.ks):
        raise ValueError(f"ks={list(config.ks)}: expected numbers from 1 to n={config.n}")
    if config.server.api == "chat" and config.tools.tool_instances:
        raise ValueError("tools need server.api=tokens: a trajectory goes on inside the model's turn")
    if config.server.api == "chat" and config.server.url is None:
        raise ValueError("server.api=chat needs server.url; a server that is started here is asked in tokens")
    if scoring == "judge" and config.judge.url is None:
        raise ValueError("scoring=judge needs judge.url, an OpenAI-compatible server; or choose scoring=qa or math")
    for side in ("server", "judge"):
        name = config[side].api_key_env
        if name and not (key := os.environ.get(name)):
            raise ValueError(f"{side}.api_key_env={name}: this environment variable is not set")
        if name and not (key.isascii() and key.isprintable() and key == key.strip()):
            raise ValueError(f"{side}.api_key_env={name}: this environment variable holds a space or a line break")


def _files(config: DictConfig) -> list[str]:
    if config.files is not None:
        return [config.files] if isinstance(config.files, str) else list(config.files)
    if files := _files_under_outputs(config.benchmark):
        return files
    raise ValueError(
        f"outputs/data/{config.benchmark} holds no {', '.join(SUFFIXES)}: get the set from "
        f"{find_benchmark(config.benchmark).get}, or name its files=[...]"
    )


def _files_under_outputs(benchmark: str) -> list[str]:
    data, own = Path("outputs/data"), []
    for path in (data / benchmark).glob("*"):
        # A benchmark's folder may also hold training data in verl's format, and demonstrations.
        fields = set(pq.read_schema(path).names) if path.suffix == ".parquet" else set()
        trains = {"data_source", "reward_model"} <= fields or "messages" in fields
        if path.suffix in SUFFIXES and (path.stem in ("test", benchmark) or not trains):
            own.append(path)
    return sorted(map(str, own or [path for suffix in SUFFIXES for path in data.glob(f"*/{benchmark}{suffix}")]))


def settings_of(plan: Plan) -> dict:
    """Return all settings on which the samples depend; samples are added to a file only if it has the same settings."""
    asked = OmegaConf.to_container(plan.config, resolve=True)
    settings = {key: value for key, value in asked.items() if key not in NOT_ASKED}
    settings |= {"scoring": plan.scoring, "model": plan.checkpoint.model if plan.checkpoint else plan.config.server.url}
    # A folder or file of the same name may have got another model or other questions in the meantime.
    settings["weights"] = fingerprint(plan.checkpoint) if plan.checkpoint else None
    settings["apply_chat_template_kwargs"] = plan.template
    digest = hashlib.sha256()
    for file in _files(plan.config):
        digest.update(Path(file).read_bytes())
    settings["data"] = digest.hexdigest()[:16]
    settings["server"] = {key: asked["server"][key] for key in ("name", "api", "tokenizer", "max_model_len", "options")}
    if plan.scoring == "judge":
        settings["judge"] = {key: asked["judge"][key] for key in ("url", "name", "max_tokens", "temperature")}
    return settings


def server_options(plan: Plan) -> list[str]:
    """Return vLLM's command-line options for the server that is started here."""
    config, gpus = plan.config.server, visible_gpus()
    options = ["--seed", str(plan.config.seed), "--tensor-parallel-size", str(config.tensor_parallel)]
    if (replicas := replicas_of(config, gpus)) > 1:
        options += ["--data-parallel-size", str(replicas)]
    if config.max_model_len is not None:
        options += ["--max-model-len", str(config.max_model_len)]
    if gpus is None:
        options += ["--dtype", "float32"]
    return [*options, *map(str, config.options)]  # YAML reads 0.5 as a number


@contextmanager
def _server(plan: Plan):
    """Yield the URL of a server with the model; the server is started here unless `server.url` names one."""
    config, log = plan.config.server, plan.path.with_name("server.txt")
    if config.url is not None:
        yield config.url
        return
    if plan.checkpoint.shards:
        try:
            with _as_evaluation_error():
                write_model_folder(plan.checkpoint.shards, Path(plan.checkpoint.model))
        except OSError:
            if not Path(plan.checkpoint.model).is_dir():  # otherwise another evaluation has been faster
                raise
    print(f"starting the server; its output is in {log}", flush=True)
    with serving(plan.checkpoint.model, log, server_options(plan)) as url:
        yield url


def _connect(side: DictConfig, url: str, at_once: int) -> tuple[list[AsyncOpenAI], str, int | None, bool]:
    """Ask a server for its models, and return clients for it, the model's name, the largest number of tokens of prompt
    and response together (None if the server does not say), and whether it knows vLLM's sampling parameters."""
    url = url.rstrip("/").removesuffix("/v1")
    key = os.environ.get(side.api_key_env or "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        reply = httpx.get(f"{url}/v1/models", headers=headers, timeout=60, trust_env=not is_loopback(httpx.URL(url)))
        models = {model["id"]: model for model in reply.raise_for_status().json()["data"]}
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise EvaluationError(
            f"{url} does not list its models ({error}): is it an OpenAI-compatible server?"
        ) from error
    if side.name is None and len(models) != 1:
        raise EvaluationError(f"{url} serves {', '.join(models) or 'nothing'}: choose one by its name")
    name = side.name or next(iter(models))
    model = models.get(name, {})
    beyond_openai = model.get("owned_by") in ("vllm", "sglang")
    return clients_of(url, key, at_once), name, model.get("max_model_len"), beyond_openai


def _scorer(plan: Plan) -> Scorer:
    if (score := find_scoring(plan.scoring).score) is not None:
        return partial(asyncio.to_thread, score)
    side = plan.config.judge
    clients, name, _, beyond_openai = _connect(side, side.url, side.concurrency)
    sampling = {"max_tokens": side.max_tokens}
    if side.temperature is not None:
        sampling["temperature"] = side.temperature
    model = ChatModel(clients, name, side.concurrency, beyond_openai)
    return Judge(model, sampling).score


def _responder(plan: Plan, url: str, tools: ToolBox | None, stack: AsyncExitStack) -> Responder:
    """Return what asks the model; leaving the stack ends what it has started."""
    config, at_once = plan.config.server, plan.requests_at_once
    clients, name, context, beyond_openai = _connect(config, url, at_once)
    sampling = sampling_of(plan.config)
    if config.api == "chat":
        if not beyond_openai and (plan.template or sampling["repetition_penalty"] != 1):
            raise EvaluationError(
                f"apply_chat_template_kwargs={plan.template}, repetition_penalty={sampling['repetition_penalty']}: "
                f"{url} is no vLLM server and takes neither; leave them at {{}} and 1, or start one by scripts/serve.sh"
            )
        return chat_responder(ChatModel(clients, name, at_once, beyond_openai), sampling, plan.template)
    from transformers import AutoTokenizer

    path = config.tokenizer or (plan.checkpoint.model if plan.checkpoint else name)
    tokenizer = AutoTokenizer.from_pretrained(path)
    stop_token_ids = end_of_sequence_ids(tokenizer, path)
    engine = ServerEngine(clients, name, at_once, sampling["repetition_penalty"])
    environment = _environment(plan, tokenizer, path, tools)
    if tools is None:
        stack.push_async_callback(environment.stop)
    keys = plan.environment.contexts
    rule = ContextRule(keys, tokenizer) if keys.change_contexts else None
    return token_responder(engine, tokenizer, plan.template, sampling, stop_token_ids, environment, context, rule)


def _environment(plan: Plan, tokenizer, path: str, tools: ToolBox | None) -> Environment:
    """Return what answers the model; raise EvaluationError if its chat template does not fit `environment=chat`."""
    name, multi_turn, keys, _ = plan.environment
    with _as_evaluation_error():
        if keys is not None:
            builder = partial(builder_of_model, tokenizer, path, plan.template)
            return Gym(keys, ChatTemplate(builder(), closes=True))
        if tools is None:
            return NO_ENVIRONMENT
        if name == "tools":
            return Tools(tools, Protocol(tokenizer, list(tools.tools)))
        reader = CallReader(multi_turn.format, tokenizer)
        builder = builder_of_model(tokenizer, path, plan.template)
        return Chat(tools, reader, ChatTemplate(builder, closes=not reader.stop_token_ids), multi_turn)


async def _collect(plan: Plan, url: str, samples: SampleFile) -> None:
    config, tools = plan.config, ToolBox(plan.tools) if plan.tools else None
    # While some responses wait for a tool or the judge, others keep the server busy.
    at_once = 2 * plan.requests_at_once
    if plan.environment.keys is not None:  # more would take each other's instances away
        at_once = min(at_once, plan.environment.keys.max_instances)
    async with AsyncExitStack() as stack:
        if tools is not None:
            stack.push_async_callback(tools.close)
            await tools.start()
        respond, score = _responder(plan, url, tools, stack), _scorer(plan)
        await collect(respond, score, plan.questions.questions, config.n, samples, seed=config.seed, at_once=at_once)


def evaluate(config: DictConfig) -> list[str]:
    """Run an evaluation on one or more benchmarks, or continue it, and return the lines of its results. With DRY_RUN=1
    in the environment nothing is started, and the lines describe the checked plans instead."""
    plans = _plans(config)
    if os.environ.get("DRY_RUN", "0") not in ("", "0"):
        lines = [line for plan in plans for line in [*plan.describe(), f"samples: {plan.path}"]]
        return [*lines, "dry run: model and data are there, nothing was started"]
    lines = []
    with ExitStack() as stack:
        url = None
        for plan in plans:
            print(*plan.describe(), sep="\n", flush=True)
            with _as_evaluation_error():
                file = SampleFile(plan.path, settings_of(plan))
            with file as samples:
                if missing(plan.questions.questions, plan.config.n, samples):
                    if plan.config.server.url is None and (problem := gpu_problem(plan.config.server, visible_gpus())):
                        raise EvaluationError(problem)
                    allow_open_files(plan.requests_at_once)
                    # The first benchmark that needs a server starts it for all.
                    url = url or stack.enter_context(_server(plan))
                    asyncio.run(_collect(plan, url, samples))
                lines += _results(plan, samples)
    return lines


def _plans(config: DictConfig) -> list[Plan]:
    names = [config.benchmark] if isinstance(config.benchmark, str) else list(config.benchmark)
    if len(names) > 1 and config.files is not None:
        raise EvaluationError(
            "files: several benchmarks have their files under outputs/data, or are evaluated one by one"
        )
    if config.skip_missing:
        absent = [name for name in names if config.files is None and not _files_under_outputs(name)]
        for name in absent:
            print(f"left out: {name}, which has no files under outputs/data; get it from {find_benchmark(name).get}")
        names = [name for name in names if name not in absent]
    return [plan_of(OmegaConf.merge(config, {"benchmark": name})) for name in names]


def _results(plan: Plan, samples: SampleFile) -> list[str]:
    config, questions = plan.config, plan.questions.questions
    rows = [samples.rows[question.id, number] for question in questions for number in range(config.n)]
    if all(row.get("lost") for row in rows):
        raise EvaluationError(f"{plan.path} holds no response: {rows[0]['lost']}; delete it when that is changed")
    try:
        metrics = measure(rows, config.ks)
    except ValueError as error:
        raise EvaluationError(f"{plan.path}: {error}") from error
    names = {"experiment": config.experiment, "step": plan.step, "dataset": config.benchmark}
    counts = {"n_samples": config.n, "n_questions": len(questions)}
    result = EvalResult(**names, **counts, metrics=metrics, settings=plan.reported)
    lines, log = format_result(result), plan.path.with_suffix(".log")
    with replacing(log) as unfinished:
        unfinished.write_text("".join(f"{line}\n" for line in [*plan.describe(), *lines]), encoding="utf-8")
    return [*lines, f"{len(rows)} samples: {plan.path}   log: {log}"]
