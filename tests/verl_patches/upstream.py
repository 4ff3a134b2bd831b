"""Checks that the code that a patch replaces, wraps or relies on is the one for which the patch was written.

The code is read from the installed files, because imported modules are patched already.
"""

import ast
import hashlib
from importlib.util import find_spec
from pathlib import Path


def definition(patch: str, module: str, name: str) -> str:
    """Return the source of a class, function or method (`Class.method`) of a module."""
    package, *path = module.split(".")
    file = Path(find_spec(package).submodule_search_locations[0], *path).with_suffix(".py")
    assert file.exists(), f"{patch} needs {module}, which is gone: adapt the patch or remove it"
    text = file.read_text()
    node = ast.parse(text)
    for part in name.split("."):
        node = next((child for child in node.body if getattr(child, "name", None) == part), None)
        assert node is not None, f"{patch} needs {module}.{name}, which is gone: adapt the patch or remove it"
    return ast.get_source_segment(text, node)


def check_unchanged(patch: str, module: str, name: str, digest: str) -> None:
    """Check the whole source of a definition.

    Args:
        patch: path of the patch's file, for the message.
        digest: the first 12 hex digits of the source's SHA-256.
    """
    digest_now = hashlib.sha256(definition(patch, module, name).encode()).hexdigest()[:12]
    assert digest_now == digest, (
        f"{module}.{name} has changed, on which {patch} relies: compare the two, adapt the patch or remove it, "
        f"and write {digest_now} into this test"
    )


def check_code(patch: str, module: str, name: str, code: str) -> None:
    """Check that a definition still contains a line of code, where several versions of it are supported."""
    assert code in definition(patch, module, name), (
        f"{module}.{name} no longer contains {code!r}, on which {patch} relies: adapt the patch or remove it"
    )
