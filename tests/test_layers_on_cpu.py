"""Imports point downwards only, as the README's table of layers says."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", sorted((ROOT / "verl").rglob("*.py")), ids=str)
def test_overlay_imports_no_recipe_and_no_script(path):
    assert not [n for n in imported(path) if n.split(".")[0] in ("recipe", "scripts", "benchmarks", "tests")]


@pytest.mark.parametrize("path", sorted((ROOT / "vllm_patches").rglob("*.py")), ids=str)
def test_vllm_patches_import_vllm_torch_and_the_one_receiver(path):
    foreign = [n for n in imported(path) if n.split(".")[0] in ("recipe", "scripts", "benchmarks", "tests", "ray")]
    assert not foreign


@pytest.mark.parametrize("path", sorted((ROOT / "recipe").rglob("*.py")), ids=str)
def test_a_recipe_imports_no_other_recipe(path):
    own = path.relative_to(ROOT / "recipe").parts[0]
    others = [n for n in imported(path) if n.startswith("recipe.") and n.split(".")[1] not in (own, "common")]
    assert not others
