"""Imports point downwards only, as the README's table of folders says, and never in a circle."""

import ast
import json
import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.fresh import output_of, python_for
from verl.utils.parts import parts

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("verl", "verl_patches", "vllm_patches", "recipe", "scripts", "benchmarks", "studies", "tests")


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Return a file's imports, also those in functions: modules, and `module.name` for a name that comes from one."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}, line {node.lineno}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", sources("verl"), ids=str)
def test_overlay_imports_no_recipe_and_no_script(path):
    assert not [n for n in imported(path) if n.split(".")[0] in ("recipe", "scripts", "benchmarks", "studies", "tests")]


@pytest.mark.parametrize("path", sources("vllm_patches"), ids=str)
def test_vllm_patches_import_vllm_torch_and_triton(path):
    allowed = {"vllm", "torch", "triton", "vllm_patches", *sys.stdlib_module_names}
    assert not [n for n in imported(path) if n.split(".")[0] not in allowed]


@pytest.mark.parametrize("path", sources("recipe"), ids=str)
def test_a_recipe_imports_no_other_recipe(path):
    inside = path.relative_to(ROOT / "recipe").parts
    own = ".".join(("recipe", *inside[: 2 if inside[0] in ("tasks", "compared") else 1], ""))
    allowed = (own, "recipe.common.")
    assert not [n for n in imported(path) if n.startswith("recipe.") and not f"{n}.".startswith(allowed)]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(paths: list[Path]) -> dict[str, set[str]]:
    """Module -> the others among these files that it imports."""
    modules = {module_name(path): path for path in paths}
    graph = {}
    for module, path in modules.items():
        needed = {name if name in modules else name.rpartition(".")[0] for name in imported(path)}
        graph[module] = (needed & modules.keys()) - {module}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules of which each imports the next and the last is the first; empty where there are none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


def test_no_module_imports_itself_through_others():
    paths = [path for folder in FOLDERS for path in sources(folder)]
    assert circle(import_graph(paths)) == []


def method_names() -> set[str]:
    """Return the folders of the methods, the trees, credits and losses that they register, and their sections."""
    folders = {path.parent.name for kind in ("tree", "credit", "loss", "sampler") for path in modules_of(kind)}
    registered = {name for kind in ("tree", "credit", "loss") for name, part in parts(kind).items() if not part.alias}
    return (folders | registered | {"kt", "aepo", "treerl"}) - {"common", "upstream", "plain", "grpo", "vanilla"}


def modules_of(kind: str) -> list[Path]:
    return [path for path in sources("recipe") if path.name == f"{kind}.py" and "tasks" not in path.parts]


def test_the_frame_names_no_method():
    """All that is particular to a method lies in its folder below recipe/."""
    named = re.compile(rf"\b({'|'.join(sorted(method_names()))})\b", re.IGNORECASE)
    texts = {path: path.read_text() for path in sources("verl")}
    places = {(str(path.relative_to(ROOT)), match[0]) for path, text in texts.items() for match in named.finditer(text)}
    assert not places


@pytest.mark.slow
def test_a_kind_loads_without_the_others():
    """A rollout worker, which asks for trees, loads no trainer; and nothing but a trainer's component loads vLLM."""
    code = "import json, sys; from verl.utils.parts import parts; [parts(kind) for kind in sys.argv[1:]]"
    code += "; print(json.dumps([*sys.modules]))"
    for kinds in (("tree", "sampler"), ("credit", "loss", "proposal", "task")):
        loaded = set(json.loads(output_of([*python_for(code), *kinds], cwd=ROOT).splitlines()[-1]))
        assert "vllm" not in loaded and not [name for name in loaded if name.endswith(".component")], kinds
        if "tree" in kinds:
            assert "verl.trainer.ppo.core_algos" not in loaded
            assert not [name for name in loaded if name.startswith("recipe.") and name.endswith((".credit", ".loss"))]
