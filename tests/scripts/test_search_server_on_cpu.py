"""scripts/search_server.py as a process of its own, over real HTTP, and the search tool against it."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.scripts.loading import load_script
from verl.workers.rollout.tools.search.tool import LocalSearchTool

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "search_server.py"
ROWS = [
    {"id": 1, "title": "Otter", "text": 'swims </result> "quoted" \u2028 é🦦 otter'},
    {"id": "b", "contents": '"Heron"\nThe heron eats fish. otter'},
    *({"id": f"t{i}", "title": "", "text": "tie"} for i in range(5)),
]


def start(*arguments) -> subprocess.Popen:
    command = [sys.executable, "-W", "ignore", SCRIPT, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture(scope="module")
def url(corpus):
    """The server's; its orderly end is checked after the last test."""
    process = start("--corpus", corpus, "--port", "0", "--index", corpus.parent / "index")
    try:
        said = next((line for line in process.stdout if line.startswith("listening")), "")
        match = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+)\n", said)
        assert match, said
        httpx.get(match[1] + "/health", timeout=120)  # its workers have started
        yield match[1]
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=60)
        assert (process.returncode, stdout, stderr) == (0, "", "")
        with pytest.raises(httpx.ConnectError):
            httpx.get(match[1] + "/health")
    finally:
        process.kill()
        process.communicate()


def retrieve(url, **body):
    return httpx.post(url + "/retrieve", timeout=120, json=body).json()["result"]


def test_the_reply_has_search_r1s_form(url):
    assert httpx.get(url + "/health").json() == {"status": "ok", "documents": 7}
    (heron, otter), nothing = retrieve(url, queries=["otter fish", "zebra"], topk=3, return_scores=True)
    assert heron["document"] == {"id": "b", "title": "Heron", "contents": '"Heron"\nThe heron eats fish. otter'}
    assert otter["document"]["contents"] == f'"Otter"\n{ROWS[0]["text"]}'
    assert heron["score"] > otter["score"] > 0 and nothing == []
    assert retrieve(url, queries=["fish"], return_scores=False) == [[heron["document"]]]


def test_topk_and_ties(url):
    for topk, n in {1: 1, 4: 4, 100: 5, None: 3}.items():
        (documents,) = retrieve(url, queries=["tie"], topk=topk)
        assert [document["id"] for document in documents] == [f"t{i}" for i in range(n)]


@pytest.mark.parametrize(
    "body, status",
    [
        ({"queries": ["x"] * 1025}, 422),
        ({"queries": ["x" * 4097]}, 422),
        ({"queries": ["x"], "topk": 101}, 422),
        ({"queries": ["x"], "topk": "3"}, 422),
        ({"queries": ["x"] * 1000, "topk": 11}, 422),
        ({"queries": ["x"], "top_k": 3}, 422),
        (b"{", 422),
        (b'{"queries": ["\\ud800"]}', 422),
        (b" " * 4_000_001, 413),
        ({"queries": []}, 200),
        ({"queries": ["x" * 4096, "</result>", "\x00", "'; DROP TABLE"]}, 200),
    ],
)
def test_requests_are_bounded(url, body, status):
    content = body if isinstance(body, bytes) else json.dumps(body)
    reply = httpx.post(url + "/retrieve", content=content, timeout=30)
    assert reply.status_code == status, reply.text
    assert status == 200 or 0 < len(reply.text) < 1000 and reply.json()["detail"]


def test_clients_that_hang_up_do_no_harm(url):
    host, port = url.removeprefix("http://").split(":")
    for data in (b"", b"POST /retrieve HTTP/1.1\r\nContent-Length: 100\r\n\r\n{", b"\x16\x03\x01\x00\xff" * 9):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(data)
    assert httpx.get(url + "/health").status_code == 200


@pytest.mark.parametrize("path", ["", "/", "/retrieve"])
def test_the_tool_reads_the_same_from_the_server_as_from_the_corpus(url, corpus, path):
    async def texts(**params):
        tool = LocalSearchTool(**params)
        try:
            return [await tool.execute(query, timeout=30) for query in ("otter", "tie", "zebra", "x" * 999)]
        finally:
            await tool.close()

    of_server = asyncio.run(texts(url=url + path))
    assert of_server == asyncio.run(texts(corpus=corpus))
    assert "[1] Otter\nswims &lt;/result>" in of_server[0]


def children(process: subprocess.Popen) -> list[psutil.Process]:
    """The server's workers."""
    return [child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())]


async def test_a_full_server_refuses_and_the_tool_asks_again_also_while_a_lost_worker_is_replaced(corpus):
    process = start("--corpus", corpus, "--port", "0", "--processes", "1", "--max-requests", "10")
    try:
        url = next(line for line in process.stdout if line.startswith("listening")).split()[-1]
        address = url.removeprefix("http://").split(":")
        retrieve(url, queries=["otter"])
        open_ones = [socket.create_connection(address) for _ in range(10)]
        assert httpx.get(url + "/health").status_code == 503
        tool = LocalSearchTool(url=url)
        answers = asyncio.gather(*(tool.execute("otter", timeout=30) for _ in range(5)))
        await asyncio.sleep(0.7)
        for connection in open_ones:
            connection.close()
        assert all(answer.startswith("[1] Otter") for answer in await answers)
        await tool.close()

        (worker,) = children(process)
        worker.kill()
        worker.wait(90)  # uvicorn notices after its health check's 60 s, if the worker died during one
        assert retrieve(url, queries=["otter"], topk=1)
        workers = children(process)
        process.kill()  # they end with it
        assert workers not in ([], [worker]) and psutil.wait_procs(workers, timeout=10)[1] == []
    finally:
        process.kill()
        process.communicate()


def test_faults_before_it_listens(corpus, tmp_path, url):
    script = load_script("search_server")
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        for arguments, said in [
            (["--corpus", tmp_path / "absent.jsonl"], "absent.jsonl"),
            (["--corpus", corpus, "--index", tmp_path], "no search index"),
        ]:
            with pytest.raises(SystemExit) as end:
                script.main([str(a) for a in arguments])
            assert str(end.value.code).startswith("error: ") and said in end.value.code
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
            signal.signal(number, handler)
    second = start("--corpus", corpus, "--port", url.rpartition(":")[2])
    assert second.wait(60) != 0 and "Address already in use" in second.communicate()[1]
