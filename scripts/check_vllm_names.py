"""Checks with a type checker, without running vLLM, that every name of vLLM that is used here exists in its sources.

    python scripts/check_vllm_names.py [WHEEL_OR_FOLDER ...]

The sources are a wheel, or a folder that holds `vllm/`, by default the installed package's. basedpyright reads our
modules that import vLLM, `vllm_names.py`, which repeats the uses that have no types, and upstream's server, whose
engine our server wraps. It also reads a module that is written here, with an attribute access for each engine argument
in YAML and each option of `vllm serve`. The script prints a line for each import, attribute, call or override that does
not fit vLLM. If there is one, the exit code is 1.
"""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

ROOT = Path(__file__).resolve().parents[1]
CODE = ("vllm_patches", "verl", "recipe", "benchmarks", "scripts")
UPSTREAM_SERVER = "verl/workers/rollout/vllm_rollout/vllm_async_server.py"
SERVE_OPTIONS = ("scripts/serve.sh", "verl/evaluation/main.py", "verl/evaluation/model/server.py")
RULES = ("MissingImports", "AttributeAccessIssue", "CallIssue", "IncompatibleMethodOverride", "GeneralTypeIssues")
# Matches messages about missing names and changed parameters. Types that differ in detail are no errors here.
MISFIT = re.compile(
    r'^Import "vllm\b|is unknown|known attribute of module "vllm|no base method|[Pp]arameter( \d| named| count)'
    r"|Keyword parameter|for parameter|Expected \d+"
)
ACCEPTED = (
    'for class "ExchangeServer"',  # a mixin that uses methods of the class it is mixed into
    'overrides class "vLLMHttpServer"',  # our server passes on options that it does not name itself
    'Base classes for class "ServeArgs"',  # both have a method `add_cli_args`
    'for class "dict[',  # an upstream variable holds a dictionary first and vLLM's parameters later
    '"num_preempted" for class "CompletionOutput"',  # upstream asks with hasattr whether it exists
    'Argument missing for parameter "internal"',  # upstream's `abort_request` is for an older vLLM
)


def engine_arguments(node) -> Iterator[str]:
    """Yield the keys below `engine_kwargs.vllm` anywhere in a YAML file."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "engine_kwargs" and isinstance(value, dict):
                yield from value.get("vllm") or {}
            yield from engine_arguments(value)


def settings_module(texts: dict[str, str], sources: Path) -> tuple[str, list[str]]:
    """Return the text of a module that accesses each engine argument and server option, and each line's source file.

    Args:
        texts: file name -> its text, for the project's Python, shell and YAML files.
    """
    frontend = re.search(r"from (\S+\.cli_args) import", (sources / "vllm/entrypoints/cli/serve.py").read_text())
    lines = [
        "from vllm.engine.arg_utils import AsyncEngineArgs",
        f"from {frontend[1] if frontend else 'vllm.entrypoints.cli_args'} import FrontendArgs",
        "class ServeArgs(AsyncEngineArgs, FrontendArgs): ...",
    ]
    files = ["vllm serve"] * len(lines)
    for file, text in texts.items():
        keys = re.findall(r"engine_kwargs\.vllm\.(\w+)", text)
        keys += engine_arguments(yaml.safe_load(text)) if file.endswith(".yaml") else []
        options = re.findall(r"(?<=[\s\"\[])--([a-z][a-z-]+)", text) if file in SERVE_OPTIONS else []
        lines += [f"AsyncEngineArgs.{key}" for key in keys]
        lines += [f"ServeArgs.{option.replace('-', '_')}" for option in options]
        files += [file] * (len(keys) + len(options))
    return "\n".join(lines), files


def diagnostics(files: list[Path], sources: Path, folder: Path) -> list[dict]:
    """Return basedpyright's reports about the files, with `vllm` from `sources`; its config is written to `folder`."""
    config = {"include": list(map(str, files)), "exclude": [], "extraPaths": [str(sources)], "typeCheckingMode": "off"}
    config |= {f"report{rule}": "error" for rule in RULES}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--project", folder]
    done = subprocess.run([*command, "--pythonpath", sys.executable], capture_output=True, text=True)
    report = json.loads(done.stdout or "{}")
    if report.get("summary", {}).get("filesAnalyzed") != len(files):
        raise SystemExit(f"error: basedpyright did not read all files; is it installed? {done.stderr}{done.stdout}")
    return report["generalDiagnostics"]


def check(sources: Path, root: Path = ROOT) -> list[str]:
    """Return a line for each use in the project at `root` that does not fit the sources; print a summary."""
    if not (sources / "vllm/__init__.py").is_file():
        raise SystemExit(f"error: {sources}: neither a wheel of vLLM nor a folder that holds vllm/")
    paths = sorted(path for folder in CODE for path in (root / folder).rglob("*") if path.is_file())
    texts = {str(path.relative_to(root)): path.read_text() for path in paths if path.suffix in (".py", ".sh", ".yaml")}
    is_user = re.compile(r"^\s*(from|import) vllm\b", re.MULTILINE)
    modules = [root / file for file, text in texts.items() if file.endswith(".py") and is_user.search(text)]
    modules.append(folder_of("verl") / UPSTREAM_SERVER)
    text, setters = settings_module(texts, sources)
    lines = []
    with TemporaryDirectory() as folder:
        settings = Path(folder).resolve() / "settings.py"
        settings.write_text(text)
        for report in diagnostics([*modules, settings], sources, settings.parent):
            message, line = " ".join(report["message"].split()), report["range"]["start"]["line"]
            place = setters[line] if report["file"] == str(settings) else f"{report['file']}:{line + 1}"
            if MISFIT.search(message) and not any(accepted in message for accepted in ACCEPTED):
                lines.append(f"{place.removeprefix(f'{root}/')}: {message}")
    version = re.search(r"version = '(.+?)'", (sources / "vllm/_version.py").read_text())
    print(f"vLLM {version[1] if version else 'unknown'} ({sources}): {len(modules)} modules, {len(lines)} misfits")
    return lines


def folder_of(package: str) -> Path:
    """Return the parent of an installed package's own folder, such as …/site-packages."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit(f"error: {package} is not installed: bash scripts/setup.sh")
    return Path(spec.submodule_search_locations[0]).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", metavar="WHEEL_OR_FOLDER", type=Path, nargs="*")
    lines = []
    for path in parser.parse_args().sources or [folder_of("vllm")]:
        with TemporaryDirectory() as folder:
            if path.is_file():
                zipfile.ZipFile(path).extractall(folder)
            lines += check(Path(folder) if path.is_file() else path.resolve())
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
