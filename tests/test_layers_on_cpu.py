"""Imports point downwards only, as the table of layers in docs/overlay.md says, and never in a circle."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("verl", "verl_patches", "vllm_patches", "recipe", "scripts", "benchmarks", "studies", "tests")


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """What a file imports, within functions too: modules, and `module.name` for each name that comes from a module."""
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


def test_a_circle_within_functions_is_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    files = {
        "a/__init__.py": "",
        "a/b.py": "def f():\n    from a import c\n",
        "a/c.py": "import a.d.e\n",
        "a/d/__init__.py": "from a.d.e import name\n",
        "a/d/e.py": "import os\nfrom a.b import f\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert set(circle(import_graph(sources("a")))) == {"a.b", "a.c", "a.d.e"}
    (tmp_path / "a/d/e.py").write_text("import os\n")
    assert circle(import_graph(sources("a"))) == []
