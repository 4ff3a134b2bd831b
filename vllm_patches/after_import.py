"""Calls functions right after a module is imported, so that patches import no module before it is needed."""

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType


class _AfterImportFinder:
    """Meta-path finder that runs a module's callbacks after the module's code; other finders find the module."""

    def __init__(self):
        self.callbacks: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(self, fullname: str, path=None, target=None) -> ModuleSpec | None:
        if not (callbacks := self.callbacks.pop(fullname, None)):
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        exec_module = spec.loader.exec_module

        def exec_then_call(module: ModuleType) -> None:
            exec_module(module)
            for callback in callbacks:
                callback(module)

        spec.loader.exec_module = exec_then_call  # type: ignore[method-assign]
        return spec


_finder = _AfterImportFinder()


def after_import(module_name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback(module)` after `module_name` is imported; at once if it has been imported already."""
    if module_name in sys.modules:
        callback(sys.modules[module_name])
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.callbacks.setdefault(module_name, []).append(callback)
