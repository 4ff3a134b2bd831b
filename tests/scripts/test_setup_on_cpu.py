"""scripts/setup.sh on a lock of two small wheels that lie in a folder."""

import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BACKEND = """
import shutil
import stat
def build_editable(folder, config_settings=None, metadata_directory=None):
    shutil.copy("project-1.0-py3-none-any.whl", folder)
    return "project-1.0-py3-none-any.whl"
"""

pytestmark = pytest.mark.slow


def make_wheel(folder, name: str, files: dict[str, str]) -> Path:
    """A wheel, version 1.0, with these texts and its record."""
    metadata = f"{name}-1.0.dist-info"
    files = files | {
        f"{metadata}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{metadata}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files |= {f"{metadata}/RECORD": "".join(f"{path},,\n" for path in [*files, f"{metadata}/RECORD"])}
    wheel = Path(folder) / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            info = zipfile.ZipInfo(path)
            info.external_attr = (stat.S_IFREG | 0o755) << 16
            archive.writestr(info, text)
    return wheel


@pytest.fixture
def checkout(tmp_path) -> Path:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/setup.sh", tmp_path / "scripts")
    (tmp_path / "backend.py").write_text(BACKEND)
    make_wheel(tmp_path, "project", {"project.pth": f"{tmp_path}/packages\n"})
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/project.py").touch()
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (tmp_path / "requirements-cpu.lock").write_text("small==1.0\ntorch==1.0\nuv==1.0\n")
    (tmp_path / "requirements-tasks.lock").write_text("small==1.0\n")
    (tmp_path / "wheels").mkdir()
    make_wheel(tmp_path / "wheels", "torch", {"torch/__init__.py": "from . import version\n__version__ = '1.0'\n",
                                              "torch/version.py": "cuda = None\n"})  # fmt: skip
    make_wheel(tmp_path / "wheels", "small", {"small/__init__.py": ""})
    uv = Path(sys.executable).parent / "uv"
    make_wheel(tmp_path / "wheels", "uv", {"uv-1.0.data/scripts/uv": f'#!/bin/bash\nexec {uv} "$@"\n'})
    return tmp_path


def set_up(checkout: Path, *tools: Path, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """Run scripts/setup.sh without a package index, and with tools on the PATH.

    pip's setting names the wheels; uv has them from there.
    """
    path = os.pathsep.join([*map(str, tools), "/usr/bin", "/bin"])
    environment = {"PATH": path, "HOME": str(checkout), "PYTHON": sys.executable, "UV_OFFLINE": "1", "UV_NO_CACHE": "1"}
    environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": f"{checkout}/wheels", "PIP_NO_CACHE_DIR": "1"}
    command = ["bash", "scripts/setup.sh", *arguments]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)


def site_packages(checkout: Path) -> Path:
    (folder,) = (checkout / ".venv/lib").glob("*/site-packages")
    return folder


def works(checkout: Path) -> bool:
    return subprocess.run([checkout / ".venv/bin/python", "-c", "import project, small, torch"]).returncode == 0


def test_setup_makes_the_environment_and_restarts_an_interrupted_one(checkout):
    result = set_up(checkout)
    assert result.returncode == 0 and works(checkout), result.stderr
    stages = [line for line in result.stdout.splitlines() if re.fullmatch(r"[123]/3 [a-z ,/.]+: \d+ s", line)]
    assert len(stages) == 3 and "with .venv/bin/uv" in stages[1]
    assert (site_packages(checkout) / "small-1.0.dist-info/INSTALLER").read_text() == "uv"
    assert set_up(checkout).stdout == ""  # the environment is up to date

    shutil.rmtree(site_packages(checkout) / "small")  # a kill between two files leaves the record
    (checkout / ".venv/installed-from").write_text("unfinished\n")
    assert set_up(checkout).returncode == 0 and works(checkout)


def test_an_environment_of_somebody_else_stays_as_it_is(checkout):
    (checkout / ".venv").mkdir()
    result = set_up(checkout)
    assert result.returncode == 1 and "was not made by this script" in result.stderr
    assert not list((checkout / ".venv").iterdir())


def test_the_gpu_versions_have_an_environment_of_their_own_if_the_disk_has_room(checkout):
    """The torch there may be a CUDA build. A program in place of `df` tells setup.sh how much disk is free."""
    (checkout / "requirements-gpu-versions.lock").write_text("torch==1.0\nuv==1.0\n")
    make_wheel(checkout / "wheels", "torch", {"torch/__init__.py": "", "torch/version.py": "cuda = '13.0'\n"})
    tools = checkout / "tools"
    tools.mkdir()
    df = tools / "df"
    df.write_text("#!/bin/bash\necho Avail\necho 9999\n")
    df.chmod(0o755)
    result = set_up(checkout, tools, arguments=("--gpu-versions",))
    assert result.returncode == 1 and not list(checkout.glob(".venv*"))
    assert re.fullmatch(r"error: .venv-gpu-versions needs 10 GB of free disk .* 9 GB are free in .*\n", result.stderr)

    df.write_text("#!/bin/bash\necho Avail\necho 10000\n")
    result = set_up(checkout, tools, arguments=("--gpu-versions",))
    assert result.returncode == 0 and not (checkout / ".venv").exists(), result.stderr
    assert (checkout / ".venv-gpu-versions/installed-from").exists()
    assert subprocess.run([checkout / ".venv-gpu-versions/bin/python", "-c", "import project, torch"]).returncode == 0
    assert set_up(checkout, tools, arguments=("--gpu-versions",)).stdout == ""  # the environment is up to date
