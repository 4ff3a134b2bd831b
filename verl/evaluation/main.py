"""Runs an evaluation from its config to its log; see scripts/evaluate.py and recipe/common/config/evaluate.yaml."""

import asyncio
import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from omegaconf import DictConfig, OmegaConf

from verl.evaluation.benchmarks import SCORINGS, find_benchmark
from verl.evaluation.checkpoint import Checkpoint, find_checkpoint, fingerprint, merge_shards
from verl.evaluation.judge import JudgeCache
from verl.evaluation.loading import QuestionSet, read_questions
from verl.evaluation.replicas import (
    allow_open_files,
    check_gpus,
    describe_server,
    replicas_of,
    visible_gpus,
)
from verl.evaluation.results import format_result_lines, write_result_log
from verl.evaluation.run import (
    ChatResponder,
    Sampling,
    TokenResponder,
    collect,
    measure,
    missing,
    result_of,
    sample_path,
)
from verl.evaluation.sample_file import SampleFile
from verl.evaluation.scoring import Judge
from verl.evaluation.server import ChatModel, ServerEngine, clients_of, serving
from verl.workers.rollout.rollout_engine import end_of_sequence_ids, generation_config_of
from verl.workers.rollout.tools.http_json import is_loopback
from verl.workers.rollout.tools.tool_box import ToolBox, ToolsConfig

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
# settings on which the samples do not depend, or that `settings_of` replaces
NOT_ASKED = ("output_dir", "ks", "server", "judge", "step", "model", "experiment", "limit", "skip_bad_rows")
NOT_ASKED += ("skip_missing",)


class EvaluationError(ValueError):
    """The evaluation cannot be made; the message names the key and says what to do."""


@dataclass(frozen=True)
class Plan:
    """What is evaluated, once config and files are known to be fine."""

    config: DictConfig
    checkpoint: Checkpoint | None
    questions: QuestionSet
    scoring: str
    tools: ToolsConfig | None

    @property
    def n_questions(self) -> int:
        return len(self.questions.questions)

    @property
    def step(self) -> int | None:
        return self.checkpoint.step if self.checkpoint else None

    @property
    def path(self) -> Path:
        """The file of the samples."""
        return sample_path(self.config.output_dir, self.config.experiment, self.step, self.config.benchmark)

    @property
    def requests_at_once(self) -> int:
        """`server.concurrency`, times the number of replicas if the server is started here."""
        server = self.config.server
        return server.concurrency * (replicas_of(server, visible_gpus()) if server.url is None else 1)

    def describe(self) -> list[str]:
        config, left_out = self.config, self.questions.left_out
        model = self.checkpoint.model if self.checkpoint else config.server.url
        lines = [f"model: {model}"]
        if self.checkpoint and self.checkpoint.shards:
            lines.append(f"merged first, from: {self.checkpoint.shards}")
        if config.server.url is None:
            lines.append(f"server: {describe_server(config.server, visible_gpus())}")
        out = "".join(f", {count} left out ({why})" for why, count in left_out.items())
        counts = f"{self.n_questions} questions x {config.n} = {self.n_questions * config.n} responses{out}"
        lines.append(f"data: {self.questions.benchmark.title}, {counts}")
        lines.append(f"scored by: {SCORINGS[self.scoring]}")
        if self.tools:
            lines.append(f"tools: {', '.join(self.tools.tool_instances)}, {self.tools.call_limit} calls a response")
        sampling = ("temperature", "top_p", "top_k", "max_tokens", "seed")
        return [*lines, "sampling: " + ", ".join(f"{name}={config[name]}" for name in sampling)]


def plan_of(config: DictConfig) -> Plan:
    """Read and check everything that can be checked before a server starts.

    Raises:
        EvaluationError: for the first problem.
    """
    try:
        benchmark = find_benchmark(config.benchmark)
        scoring = config.scoring or benchmark.scoring
        _check_keys(config, scoring)
        tools = ToolsConfig(**OmegaConf.to_container(config.tools, resolve=True))
        tools = tools if tools.tool_instances else None
        questions = read_questions(
            config.benchmark,
            _files(config),
            where=OmegaConf.to_container(config.where),
            style=config.style,
            tool_tags=tuple(_tags(tools)),
            system=config.system,
            skip_bad_rows=config.skip_bad_rows,
        )
    except (ValueError, TypeError) as error:
        raise EvaluationError(str(error)) from error
    if config.limit is not None:
        questions = QuestionSet(questions.benchmark, questions.questions[: config.limit], questions.left_out)
    return Plan(config, _checkpoint(config), questions, scoring, tools)


def _check_keys(config: DictConfig, scoring: str) -> None:
    if scoring not in SCORINGS:
        raise ValueError(f"scoring={scoring}: choose one of {', '.join(SCORINGS)}")
    if config.server.api not in ("tokens", "chat"):
        raise ValueError(f"server.api={config.server.api}: choose tokens or chat")
    numbers = ["n", "max_tokens", "server.tensor_parallel", "server.concurrency"]
    for key in [*numbers, *(["server.data_parallel"] if config.server.data_parallel is not None else [])]:
        value = OmegaConf.select(config, key)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{key}={value}: expected a whole number of at least 1")
    if not 0 < config.top_p <= 1:
        raise ValueError(f"top_p={config.top_p}: expected a number above 0, up to 1")
    if config.temperature < 0 or (config.temperature == 0 and config.n > 1):
        raise ValueError(f"temperature={config.temperature} with n={config.n}: equal samples; expected more than 0")
    if wrong := [k for k in config.ks if not 1 <= k <= config.n]:
        raise ValueError(f"ks={list(config.ks)}: {wrong[0]} is not from 1 to n={config.n}")
    if config.server.api == "chat" and config.tools.tool_instances:
        raise ValueError("tools need server.api=tokens: a trajectory goes on inside the model's turn")
    if config.server.api == "chat" and config.server.url is None:
        raise ValueError("server.api=chat needs server.url; a server that is started here is asked in tokens")
    if scoring == "judge" and config.judge.url is None:
        raise ValueError("scoring=judge needs judge.url, an OpenAI-compatible server; or choose scoring=qa or math")
    for side in ("server", "judge"):
        name = config[side].api_key_env
        if name and not os.environ.get(name):
            raise ValueError(f"{side}.api_key_env={name}: this environment variable is not set")


def _tags(tools: ToolsConfig | None) -> list[str]:
    if tools is None:
        return []
    from verl.workers.rollout.tools.tool_box import tool_class

    return [tool_class(name, instance)[0].trigger_tag for name, instance in tools.tool_instances.items()]


def _files(config: DictConfig) -> list[str]:
    if config.files is not None:
        return [config.files] if isinstance(config.files, str) else list(config.files)
    if not (files := _files_under_outputs(config.benchmark)):
        get = find_benchmark(config.benchmark).get
        raise ValueError(
            f"outputs/data/{config.benchmark} holds no {', '.join(SUFFIXES)}: get the set from {get}, or name its "
            "files=[...]"
        )
    return files


def _files_under_outputs(benchmark: str) -> list[str]:
    data = Path("outputs/data")
    own = [path for path in (data / benchmark).glob("*") if path.suffix in SUFFIXES]
    return sorted(map(str, own or [path for suffix in SUFFIXES for path in data.glob(f"*/{benchmark}{suffix}")]))


def _checkpoint(config: DictConfig) -> Checkpoint | None:
    from verl.trainer.preflight import PreflightError, check_model_path

    if config.model is not None:
        try:
            check_model_path("model", config.model)
        except PreflightError as error:
            raise EvaluationError(str(error)) from error
        return Checkpoint(config.model, None)
    if config.server.url is not None:
        return None
    return find_checkpoint(config.experiment, config.step)


def settings_of(plan: Plan) -> dict:
    """All that the samples depend on: samples are added to a file only if its settings are the same."""
    asked = OmegaConf.to_container(plan.config, resolve=True)
    settings = {key: value for key, value in asked.items() if key not in NOT_ASKED}
    settings |= {"scoring": plan.scoring, "model": plan.checkpoint.model if plan.checkpoint else plan.config.server.url}
    # the same folder may hold another model in the meantime
    settings["weights"] = fingerprint(plan.checkpoint) if plan.checkpoint else None
    if plan.scoring == "judge":
        settings["judge"] = {key: asked["judge"][key] for key in ("url", "name", "max_tokens", "temperature")}
    return settings


def _check_machine(plan: Plan) -> None:
    """Check the GPUs, and allow as many open files as connections need.

    Raises:
        EvaluationError: this machine has too few GPUs for the server, or allows too few connections to it.
    """
    try:
        if plan.config.server.url is None:
            check_gpus(plan.config.server, visible_gpus())
        allow_open_files(plan.requests_at_once)
    except ValueError as error:
        raise EvaluationError(str(error)) from error


def server_options(plan: Plan) -> list[str]:
    """vLLM's options for the server that is started here."""
    config, gpus = plan.config.server, visible_gpus()
    options = ["--seed", str(plan.config.seed), "--tensor-parallel-size", str(config.tensor_parallel)]
    if (replicas := replicas_of(config, gpus)) > 1:
        options += ["--data-parallel-size", str(replicas)]
    if config.max_model_len is not None:
        options += ["--max-model-len", str(config.max_model_len)]
    if gpus is None:
        options += ["--dtype", "float32"]
    return [*options, *config.options]


@contextmanager
def _server(plan: Plan):
    """The URL of a server with the model; the server is started here unless `server.url` names one."""
    config, log = plan.config.server, plan.path.with_name("server.txt")
    if config.url is not None:
        yield config.url
        return
    if plan.checkpoint.shards:
        merge_shards(plan.checkpoint.shards, Path(plan.checkpoint.model))
    print(f"starting the server; its output is in {log}", flush=True)
    with serving(plan.checkpoint.model, log, server_options(plan)) as url:
        yield url


def _served(side: DictConfig, url: str) -> tuple[str, int | None]:
    """The name and the context length of the model that a server serves.

    Raises:
        EvaluationError: the server does not list its models, or serves several and the config names none.
    """
    key = os.environ.get(side.api_key_env) if side.api_key_env else None
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        reply = httpx.get(
            f"{url.rstrip('/')}/v1/models", headers=headers, timeout=60, trust_env=not is_loopback(httpx.URL(url))
        )
        models = {model["id"]: model.get("max_model_len") for model in reply.raise_for_status().json()["data"]}
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise EvaluationError(
            f"{url} does not list its models ({error}): is it an OpenAI-compatible server?"
        ) from error
    if side.name is None and len(models) != 1:
        raise EvaluationError(f"{url} serves {', '.join(models) or 'nothing'}: choose one by its name")
    name = side.name or next(iter(models))
    return name, models.get(name)


async def _collect(plan: Plan, url: str, samples: SampleFile) -> None:
    config = plan.config
    name, context = _served(config.server, url)
    at_once = plan.requests_at_once
    clients = clients_of(url, os.environ.get(config.server.api_key_env or ""), at_once)
    sampling = Sampling(config.temperature, config.top_p, config.top_k, config.max_tokens)
    judge, tools = None, ToolBox(plan.tools) if plan.tools else None
    if config.server.api == "chat":
        responder = ChatResponder(ChatModel(clients, name, at_once), sampling)
    else:
        from transformers import AutoTokenizer

        path = config.server.tokenizer or (plan.checkpoint.model if plan.checkpoint else name)
        tokenizer = AutoTokenizer.from_pretrained(path)
        engine = ServerEngine(clients, name, at_once)
        responder = TokenResponder(
            engine, tokenizer, sampling, end_of_sequence_ids(tokenizer, generation_config_of(path)), tools, context
        )
    cache = JudgeCache(config.judge.cache) if plan.scoring == "judge" else None
    if cache is not None:
        judged_by, _ = _served(config.judge, config.judge.url)
        model = ChatModel(
            clients_of(config.judge.url, os.environ.get(config.judge.api_key_env or ""), config.judge.concurrency),
            judged_by,
            config.judge.concurrency,
        )
        judge = Judge(model, cache, {"max_tokens": config.judge.max_tokens, "temperature": config.judge.temperature})
    try:
        await collect(
            responder,
            plan.questions.questions,
            config.n,
            samples,
            scoring=plan.scoring,
            judge=judge,
            seed=config.seed,
            # while some responses wait for a tool or the judge, others keep the server busy
            at_once=2 * at_once,
        )
    finally:
        if tools is not None:
            await tools.close()


def evaluate(config: DictConfig) -> list[str]:
    """Run an evaluation on one or more benchmarks, or continue it; returns the lines of its results.

    Raises:
        EvaluationError: the evaluation cannot be made.
    """
    plans = _plans(config)
    if os.environ.get("DRY_RUN", "0") not in ("", "0"):
        lines = [line for plan in plans for line in [*plan.describe(), f"samples: {plan.path}"]]
        return [*lines, "dry run: model and data are there, nothing was started"]
    lines = []
    with ExitStack() as stack:
        url = None
        for plan in plans:
            print(*plan.describe(), sep="\n", flush=True)
            with _samples(plan) as samples:
                if missing(plan.questions.questions, plan.config.n, samples):
                    _check_machine(plan)
                    # the first benchmark that needs a server starts it for all
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
    plans = []
    for name in names:
        of_benchmark = config.copy()
        of_benchmark.benchmark = name
        plans.append(plan_of(of_benchmark))
    return plans


def _samples(plan: Plan) -> SampleFile:
    path = plan.path
    try:
        return SampleFile(path, settings_of(plan))
    except BlockingIOError as error:
        raise EvaluationError(f"{path}: another evaluation is writing to it") from error
    except ValueError as error:
        raise EvaluationError(str(error)) from error


def _results(plan: Plan, samples: SampleFile) -> list[str]:
    """Measure the samples and write the log; returns the lines of the results."""
    config, questions = plan.config, plan.questions.questions
    try:
        estimates = measure(samples, questions, config.n, list(config.ks))
    except ValueError as error:
        raise EvaluationError(f"{plan.path}: {error}") from error
    result = result_of(
        estimates,
        experiment=config.experiment,
        step=plan.step,
        dataset=config.benchmark,
        n=config.n,
        n_questions=len(questions),
    )
    lines, log = format_result_lines([result]), plan.path.with_suffix(".log")
    write_result_log(log, [*plan.describe(), *lines])
    return [*lines, f"{len(questions) * config.n} samples: {plan.path}   log: {log}"]
