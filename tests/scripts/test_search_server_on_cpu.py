"""scripts/search_server.py as a process of its own, over real HTTP, and the search tool against it."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import time
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
    return httpx.post(url + "/retrieve", timeout=30, json=body).json()["result"]


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


STUB = """
import sys, time, types
sys.path.insert(0, "scripts")
import search_server as script

class Stub:
    def search(self, query, k):
        time.sleep(0.05)
        with open({log!r}, "a") as log:
            log.write(query + chr(10))
        return [(types.SimpleNamespace(id="1", title="a", contents=query), 1.0)]

script.open_index = lambda corpus, folder: Stub()
script.main(["--corpus", "none", "--port", "0", "--processes", "4", "--longest-wait", "1"])
"""


@pytest.fixture
def slow(tmp_path):
    """A server with four processes, whose searches take 0.05 s: (its process, URL, function for its queries)."""
    log = tmp_path / "log"
    command = [sys.executable, "-W", "ignore", "-c", STUB.format(log=str(log))]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        url = next(line for line in process.stdout if line.startswith("listening")).split()[-1]
        log.write_text("")  # without the trial's queries
        yield process, url, lambda: log.read_text().split()
    finally:
        process.kill()
        process.communicate()


async def test_200_clients_of_a_slow_index_are_served_or_refused_at_once(slow):
    async def reply(client: httpx.AsyncClient, i: int) -> tuple[int, float]:
        started = time.monotonic()
        response = await client.post(slow[1] + "/retrieve", json={"queries": [f"q{i}"]}, timeout=60)
        return response.status_code, time.monotonic() - started

    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None)) as client:
        outcomes = await asyncio.gather(*(reply(client, i) for i in range(200)))
    served, refused = ([took for status, took in outcomes if status == each] for each in (200, 503))
    assert len(served) + len(refused) == 200 and len(refused) >= 50
    assert 60 <= len(served) == len(slow[2]())  # 1 s of four processes is 80 searches
    assert sorted(refused)[len(refused) // 2] < max(served) < 5  # one after the other, 200 searches take 10 s


def test_clients_that_hang_up_while_they_wait_cost_no_search(slow):
    address, body = slow[1].removeprefix("http://").split(":"), b'{"queries": ["gone"]}'
    for _ in range(60):
        with socket.create_connection(address) as connection:
            connection.sendall(b"POST /retrieve HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    assert httpx.post(slow[1] + "/retrieve", json={"queries": ["last"]}, timeout=30).status_code == 200
    assert slow[2]()[-1] == "last" and len(slow[2]()) < 30


async def test_every_call_of_200_tools_is_answered_and_a_lost_process_is_replaced(slow):
    tool = LocalSearchTool(url=slow[1])
    answers = asyncio.gather(*(tool.execute(f"q{i}", timeout=60) for i in range(200)))
    await asyncio.sleep(0.5)
    psutil.Process(slow[0].pid).children()[0].kill()
    assert [answer.text.split()[-1] for answer in await answers] == [f"q{i}" for i in range(200)]
    await tool.close()


def test_faults_before_it_listens(corpus, tmp_path, url):
    script = load_script("search_server")
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        for arguments, said in [
            (["--corpus", tmp_path / "absent.jsonl"], "absent.jsonl"),
            (["--corpus", corpus, "--index", tmp_path], "not a search index"),
        ]:
            with pytest.raises(SystemExit) as end:
                script.main([str(a) for a in arguments])
            assert str(end.value.code).startswith("error: ") and said in end.value.code
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
            signal.signal(number, handler)
    second = start("--corpus", corpus, "--port", url.rpartition(":")[2])
    assert second.wait(60) != 0 and "address already in use" in second.communicate()[1]
