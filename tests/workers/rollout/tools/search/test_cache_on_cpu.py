"""The search cache: shared by processes that may be killed, bounded, never thrown away by itself, and private."""

import asyncio
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from tests.workers.rollout.tools.search.animals import ANIMALS, write_jsonl
from verl.workers.rollout.tools.search import cache as search_cache
from verl.workers.rollout.tools.search.cache import SearchCache, node_folder
from verl.workers.rollout.tools.search.tool import LocalSearchTool

N_WRITERS, PUTS_EACH = 8, 1250
# without `import verl`, which takes seconds; the line with the count is written after `put` has returned
WRITER = f"""
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("search_cache", {search_cache.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
path, writer, log = sys.argv[1:]
done = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
cache = module.SearchCache(path)
for i in range({PUTS_EACH}):
    cache.put(f"{{writer}} {{i}}", f"{{writer}} {{i}} " * 100)
    os.write(done, b"x")
"""


def n_entries(cache: SearchCache) -> int:
    return cache._one("SELECT count(*) FROM cache")


def test_entries_are_read_by_others_too(tmp_path):
    with_emoji = "grüße 🦦\nline two"
    cache = SearchCache(tmp_path / "deep" / "cache.sqlite")
    assert cache.get("q") is None
    cache.put("q", "old")
    cache.put("q", with_emoji)
    other = SearchCache(tmp_path / "deep" / "cache.sqlite")
    assert other.get("q") == with_emoji and n_entries(other) == 1
    cache.close()
    with pytest.raises(sqlite3.Error):
        cache.get("q")
    other.close()


def test_threads_of_one_process(tmp_path):
    cache = SearchCache(tmp_path / "c")
    threads = [
        threading.Thread(target=lambda t=t: [cache.put(f"{t} {i}", f"{t} {i}") for i in range(100)]) for t in range(8)
    ]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert n_entries(cache) == 800 and cache.get("7 99") == "7 99"


def test_killed_writers_lose_at_most_the_entry_in_flight(tmp_path):
    path, logs = tmp_path / "cache.sqlite", [tmp_path / f"log{w}" for w in range(N_WRITERS)]
    writers = [subprocess.Popen([sys.executable, "-S", "-c", WRITER, path, str(w), log]) for w, log in enumerate(logs)]
    end = time.monotonic() + 300
    while sum(log.stat().st_size for log in logs if log.exists()) < N_WRITERS * PUTS_EACH // 2:
        assert time.monotonic() < end, "the writers are too slow"
        time.sleep(0.005)
    random.Random(0).shuffle(writers)
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
    assert any(writer.wait() == -signal.SIGKILL for writer in writers), "all had ended before"
    done = [log.stat().st_size if log.exists() else 0 for log in logs]

    cache = SearchCache(path)
    assert cache._one("PRAGMA integrity_check") == "ok"
    for w, n_done in enumerate(done):
        assert all(cache.get(f"{w} {i}") == f"{w} {i} " * 100 for i in range(n_done)), f"writer {w} lost entries"
    assert 0 <= n_entries(cache) - sum(done) <= N_WRITERS
    cache.put("life goes", "on")
    assert cache.get("life goes") == "on"


def test_the_oldest_go_when_the_cache_is_full(tmp_path):
    path, limit = tmp_path / "cache.sqlite", 2_000_000
    cache = SearchCache(path, size_mb=limit / 1e6)
    for i in range(1500):
        cache.put(f"{i}", f"{i:04}" * 1000)  # 6 MB in all
    kept = [i for i in range(1500) if cache.get(f"{i}") is not None]
    assert kept == list(range(kept[0], 1500)), "not the oldest went"
    assert 0.4 * limit < 4000 * len(kept) <= limit
    assert path.stat().st_size < 1.3 * limit
    assert n_entries(cache) == len(kept)


def test_files_that_cannot_be_read_are_logged_and_left_alone(tmp_path, caplog):
    path, corpus = tmp_path / "cache.sqlite", write_jsonl(tmp_path / "c.jsonl", ANIMALS)
    for content in (random.Random(1).randbytes(20_000), b'{"otter": "1."}'):
        path.write_bytes(content)
        assert "mole" in search(corpus, path) and path.read_bytes() == content
        assert "cache.sqlite is left unused: file is not a database" in caplog.text
        caplog.clear()
    assert "mole" in search(corpus, tmp_path) and "left unused: unable to open" in caplog.text
    with pytest.raises(ValueError, match="size"):
        SearchCache(tmp_path / "c", size_mb=0)


def test_a_damaged_file_answers_or_is_logged(tmp_path, caplog):
    path, corpus = tmp_path / "cache.sqlite", write_jsonl(tmp_path / "c.jsonl", ANIMALS)
    cache = SearchCache(path)
    for i in range(300):
        cache.put(f"{i}", "x" * 1000)
    cache.close()
    whole, half = path.read_bytes(), path.stat().st_size // 2
    noise = random.Random(1).randbytes(len(whole) - 4096)
    for content in (whole[:half], whole[:4096] + noise):
        path.write_bytes(content)
        assert "mole" in search(corpus, path)
    assert "database disk image is malformed" in caplog.text


def search(corpus, cache_file) -> str:
    """Return what the tool answers, in lower case."""

    async def run():
        tool = LocalSearchTool(corpus=corpus, cache_file=cache_file)
        try:
            return (await tool.execute("mole", timeout=5)).lower()
        finally:
            await tool.close()

    return asyncio.run(run())


# ---- the folder of a node ----

FOLDER = f"verl_search_cache_{os.getuid()}"
# a process that opens the cache as the tool does, without `import verl`, which takes seconds
PROCESS = f"""
import runpy, sys
folder = runpy.run_path({search_cache.__file__!r})["node_folder"]()
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
        folder = node_folder()
    finally:
        os.umask(before)
    assert folder == temporary / FOLDER and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert node_folder() == folder


def test_a_folder_that_others_could_have_filled_is_refused(temporary, monkeypatch):
    (temporary / FOLDER).mkdir()
    (temporary / FOLDER).chmod(0o770)
    with pytest.raises(ValueError, match="open to other users.*chmod 700"):
        node_folder()
    (temporary / FOLDER).chmod(0o700)
    node_folder()
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    (temporary / f"verl_search_cache_{owner + 1}").mkdir(mode=0o700)
    with pytest.raises(ValueError, match=f"not yours but user {owner}'s"):
        node_folder()


def test_links_and_files_are_refused(temporary):
    (temporary / "mine").mkdir(mode=0o700)
    (temporary / FOLDER).symlink_to(temporary / "mine")
    with pytest.raises(ValueError, match="cache_file=node_local: .* is a link or a file"):
        LocalSearchTool(url="http://127.0.0.1:9", cache_file="node_local")
    (temporary / FOLDER).unlink()
    (temporary / FOLDER).write_text("")
    with pytest.raises(ValueError, match="is a link or a file"):
        node_folder()


def test_two_corpora_of_the_same_name_share_a_nodes_cache_without_mixing(temporary, monkeypatch):
    for name in ("Anna", "Berta", "Clara"):
        (folder := temporary / ("b" if name == "Berta" else "a")).mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        write_jsonl(folder / "corpus.jsonl", [{"id": "1", "title": name, "text": f"{name} tends the otter"}])
        tool = LocalSearchTool(corpus="corpus.jsonl", cache_file="node_local")
        assert f"{name} tends" in asyncio.run(tool.execute("who tends the otter", timeout=20))
        asyncio.run(tool.close())


def test_the_processes_of_a_node_share_the_cache(temporary):
    writers = [subprocess.Popen([sys.executable, "-S", "-c", PROCESS, name]) for name in ("otter", "heron")]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    tool = LocalSearchTool(url="http://127.0.0.1:9", cache_file="node_local")
    assert [tool._cache.get(name) for name in ("otter", "heron")] == ["kept by otter", "kept by heron"]
    assert (temporary / FOLDER / "search_cache.sqlite").exists()
