"""Files of one node: the folder is private, and network file systems are told by the mounts."""

import os
import stat
import subprocess
import sys
import tempfile

import psutil
import pytest

from tests.tables import table
from verl.workers.rollout.tools.search import cache as search_cache
from verl.workers.rollout.tools.search import node_files
from verl.workers.rollout.tools.search.node_files import network_file_system, node_folder
from verl.workers.rollout.tools.search.tool import BingSearchTool, LocalSearchTool

FOLDER = f"verl_search_cache_{os.getuid()}"
# a process that opens the cache as the tool does, without `import verl`, which takes seconds
PROCESS = f"""
import runpy, sys
folder = runpy.run_path({node_files.__file__!r})["node_folder"]("search_cache")
cache = runpy.run_path({search_cache.__file__!r})["SearchCache"](folder / "search_cache.sqlite")
cache.put(sys.argv[1], "kept by " + sys.argv[1])
"""
MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
tmpfs /tmp tmpfs rw 0 0
server:/home /home nfs4 rw,vers=4.2 0 0
/dev/nvme0n1 /home/me/scratch xfs rw 0 0
10.0.0.1@o2ib:/big /mnt/big\\040disk lustre rw 0 0
me@there:/ /mnt/ssh fuse.sshfs rw 0 0
portal /mnt/portal fuse.portal rw 0 0
automount /data autofs rw 0 0
server:/data /data nfs rw 0 0
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The node's temporary directory, for this process and those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.fixture
def mount(tmp_path_factory, monkeypatch):
    """Lets the system show these mounts, in the form of /proc/mounts."""

    def show(table: str) -> None:
        proc = tmp_path_factory.mktemp("proc")
        (proc / "self").mkdir()
        (proc / "self" / "mounts").write_text(table)
        monkeypatch.setattr(psutil, "PROCFS_PATH", str(proc))

    return show


def test_the_folder_is_made_for_its_user_only(temporary):
    before = os.umask(0)  # the widest
    try:
        folder = node_folder("search_cache")
    finally:
        os.umask(before)
    assert folder == temporary / FOLDER and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert node_folder("search_cache") == folder


def test_a_folder_that_others_could_have_filled_is_refused(temporary, monkeypatch):
    (temporary / FOLDER).mkdir()
    (temporary / FOLDER).chmod(0o770)
    with pytest.raises(ValueError, match="open to other users.*chmod 700"):
        node_folder("search_cache")
    (temporary / FOLDER).chmod(0o700)
    node_folder("search_cache")
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    (temporary / f"verl_search_cache_{owner + 1}").mkdir(mode=0o700)
    with pytest.raises(ValueError, match=f"not yours but user {owner}'s"):
        node_folder("search_cache")


def test_links_and_files_are_refused(temporary):
    (temporary / "mine").mkdir(mode=0o700)
    (temporary / FOLDER).symlink_to(temporary / "mine")
    with pytest.raises(ValueError, match="is a link or a file"):
        node_folder("search_cache")
    with pytest.raises(ValueError, match="cache_file=node_local: .* is a link"):
        LocalSearchTool(url="http://127.0.0.1:9", cache_file="node_local")
    (temporary / FOLDER).unlink()
    (temporary / FOLDER).write_text("")
    with pytest.raises(ValueError, match="is a link or a file"):
        node_folder("search_cache")


def test_the_processes_of_a_node_share_the_cache(temporary):
    writers = [subprocess.Popen([sys.executable, "-S", "-c", PROCESS, name]) for name in ("otter", "heron")]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    tool = LocalSearchTool(url="http://127.0.0.1:9", cache_file="node_local")
    assert [tool._cache.get(name) for name in ("otter", "heron")] == ["kept by otter", "kept by heron"]
    assert (temporary / FOLDER / "search_cache.sqlite").exists()


@pytest.mark.parametrize(("path", "kind"), table(__file__, "file systems"))
def test_network_file_systems(mount, path, kind):
    mount(MOUNTS)
    assert network_file_system(path) == kind


def test_a_link_to_a_network_file_system_is_one(mount, tmp_path):
    mount(MOUNTS)
    (tmp_path / "near").symlink_to("/home/me")
    assert network_file_system(tmp_path / "near" / "cache.sqlite") == "nfs4"


def test_this_machines_mounts_can_be_read(tmp_path):
    assert network_file_system(tmp_path) is None


def test_a_cache_on_a_network_file_system_is_refused_before_and_in_the_worker(temporary, mount):
    mount(f"server:/ {temporary} nfs rw 0 0\n")
    message = "cache_file=.*network file system .nfs.*node_local"
    for cls, params in (
        (LocalSearchTool, {"url": "http://127.0.0.1:9"}),
        (BingSearchTool, {"api_key": "k", "zone": "z"}),
    ):
        for refuse in (cls.check, cls):
            with pytest.raises(ValueError, match=message):
                refuse(**params, cache_file=f"{temporary}/cache.sqlite")
        cls.check(**params, cache_file="node_local")
        with pytest.raises(ValueError, match=message):  # the node's temporary directory is far too
            cls(**params, cache_file="node_local")
        cls.check(**params, cache_file=None)
