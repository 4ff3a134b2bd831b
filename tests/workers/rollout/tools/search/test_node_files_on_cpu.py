"""The folder of one node is private, and its processes share the cache in it."""

import os
import stat
import subprocess
import sys
import tempfile

import pytest

from verl.workers.rollout.tools.search import cache as search_cache
from verl.workers.rollout.tools.search.cache import node_folder
from verl.workers.rollout.tools.search.tool import LocalSearchTool

FOLDER = f"verl_search_cache_{os.getuid()}"
# a process that opens the cache as the tool does, without `import verl`, which takes seconds
PROCESS = f"""
import runpy, sys
folder = runpy.run_path({search_cache.__file__!r})["node_folder"]("search_cache")
cache = runpy.run_path({search_cache.__file__!r})["SearchCache"](folder / "search_cache.sqlite")
cache.put(sys.argv[1], "kept by " + sys.argv[1])
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The node's temporary directory, for this process and those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


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
