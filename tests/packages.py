"""Packages that only tests need: fetched with pip once, kept in the environment's folder, and on nobody's path."""

import fcntl
import re
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from verl.utils.atomic_files import new_folder

ROOT = Path(__file__).resolve().parents[1]
# the vLLM that `pip install -e '.[gpu]'` installs; the tests' environment has the CPU build of a newer one
GPU_VLLM = re.search(r'"(vllm==[\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
# the release for the torch that is installed; its interpreter runs the kernels of vLLM's V2 model runner on the CPU
TRITON = "triton==3.7.1"


def unpacked(requirement: str, pattern: str = "*", metadata: bool = False) -> Path:
    """A folder with the files of a package's wheel whose names match, to put on a subprocess's PYTHONPATH.

    Where pip gets no wheel, as without a network, the test is skipped, and says why.

    Args:
        requirement: such as `triton==3.7.1`.
        metadata: whether the package's metadata, by which its version is known, is unpacked too; else the environment's
            own package keeps its version.
    """
    name = requirement.replace("==", "-") + "-with-metadata" * metadata
    folder = Path(sys.prefix) / "test-packages" / name
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if folder.exists():
            return folder
        with TemporaryDirectory() as downloads:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=1"]
            pip += ["--quiet", "--disable-pip-version-check", "--dest", downloads, requirement]
            done = subprocess.run(pip, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"pip gets no wheel of {requirement}: {done.stderr.strip()[-300:]}")
            (wheel,) = Path(downloads).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive, new_folder(folder) as unfinished:
                files = [name for name in archive.namelist() if fnmatch(name, pattern)]
                archive.extractall(unfinished, [name for name in files if metadata or ".dist-info/" not in name])
    return folder


# TextWorld and what it imports; its own requirements name more. The jericho that it needs is compiled.
TEXTWORLD = "textworld==1.7.0 jericho==3.3.1 TatSu==5.8.3 mementos==1.3.1 hashids==1.3.1 prompt_toolkit==3.0.53"
TEXTWORLD += " termcolor==3.3.0 wcwidth"


def installed(requirements: str) -> Path:
    """A folder with these packages, which pip may compile, and nothing that they require, to put on a PYTHONPATH.

    Where pip cannot install them, as without a network, the test is skipped, and says why.
    """
    folder = Path(sys.prefix) / "test-packages" / requirements.partition(" ")[0].replace("==", "-")
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if folder.exists():
            return folder
        with new_folder(folder) as unfinished:
            pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--retries=1", "--quiet"]
            pip += ["--disable-pip-version-check", "--target", str(unfinished), *requirements.split()]
            done = subprocess.run(pip, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"pip cannot install {requirements}: {done.stderr.strip()[-300:]}")
    return folder
