"""The search tools, local and web, for calls such as `<search>who tends otters</search>`.

The model reads numbered passages, one per paragraph, in neutral text (tools/plain_text.py), or a sentence that says
why there are none:

    [1] Otter
    The otter is tended by …

    [2] Heron (en.wikipedia.org)
    …
"""

import asyncio
import logging
import os
import random
import sqlite3
import time
from abc import abstractmethod
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import httpx

from verl.workers.rollout.tools.base_tool import BaseTool, ToolError
from verl.workers.rollout.tools.http_json import checked_url, is_loopback, json_client, post_json
from verl.workers.rollout.tools.plain_text import neutral, one_line
from verl.workers.rollout.tools.search.cache import SearchCache, node_folder

FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0  # most seconds between requests to a busy server, doubling
MAX_QUERY_CHARS = 1000
MAX_TITLE_CHARS = 200
NOTHING_FOUND = "No results found."
NODE_LOCAL = "node_local"
# errors raised when a reply has an unexpected form
BAD_REPLY = (AttributeError, KeyError, TypeError, ValueError, httpx.InvalidURL)

logger = logging.getLogger(__name__)


class Passage(NamedTuple):
    title: str
    text: str
    source: str = ""


def passages_text(passages: list[Passage], result_length: int) -> str:
    """Return the passages as text for the model; one's text is one line, so that none can look like several."""
    paragraphs = []
    for i, passage in enumerate(passages, start=1):
        source = one_line(passage.source, MAX_TITLE_CHARS)
        heading = f"[{i}] {one_line(passage.title, MAX_TITLE_CHARS)}" + (f" ({source})" if source else "")
        paragraphs.append(f"{heading}\n{one_line(passage.text, result_length)}".strip())
    return neutral("\n\n".join(paragraphs)) or NOTHING_FOUND


@dataclass(kw_only=True, eq=False, repr=False)
class SearchTool(BaseTool):
    """The common part of both search tools: check of the query, cache, request, and text for the model.

    Subclasses set `_url`, `_server`, the server's name for the model, and `_settings`, the part of the cache's key with
    all that an answer depends on except the query, without secrets.

    Args:
        max_results: number of passages per search, at most 100.
        result_length: largest number of characters of a passage's text.
        request_timeout: time limit of one request, in seconds; the caller's time limit applies too.
        cache_file: file of the cache (cache.py) on a local disk; "node_local" for a private folder in the node's
            temporary directory, shared by the user's runs on the node; None for no cache. Use a new file if the content
            of the corpus or server changes. Only searches with a result are kept.
        cache_size_mb: largest size of the cache, in 10^6 bytes.
        async_cache_write: accepted without effect: writing never delays other trajectories.
    """

    name = trigger_tag = "search"
    argument = "query"
    summary = "Searches for passages of text and returns the best ones."

    max_results: int = 3
    result_length: int = 1000
    request_timeout: float = 30
    cache_file: str | Path | None = None
    cache_size_mb: float = 512
    async_cache_write: bool = False

    def __post_init__(self):
        for key, most in (("max_results", 100), ("result_length", 100_000)):
            value = getattr(self, key)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{key} must be an integer from 1 to {most}, got {value!r}")
        if not self.request_timeout > 0:
            raise ValueError(f"request_timeout must be positive, got {self.request_timeout!r}")
        cache_file = self.cache_file
        if cache_file == NODE_LOCAL:
            cache_file = node_folder() / "search_cache.sqlite"
        self._cache: SearchCache | None = None
        if cache_file:
            try:
                self._cache = SearchCache(cache_file, size_mb=self.cache_size_mb)
            except sqlite3.Error as error:
                logger.warning("cache_file=%s is left unused: %s", cache_file, error)
        self._cache_faults: set[str] = set()
        self._client: httpx.AsyncClient | None = None

    @abstractmethod
    def _payload(self, query: str) -> dict:
        """Return the body of the request."""

    @abstractmethod
    def _passages(self, reply: Any) -> list[Passage]:
        """Return the reply's passages; raise an error of `BAD_REPLY` for a reply of another form."""

    async def _search(self, query: str, timeout: float) -> list[Passage]:
        timeout = min(timeout, self.request_timeout)
        reply = await post_json(self._client, self._url, self._payload(query), timeout=timeout, server=self._server)
        try:
            return self._passages(reply)
        except BAD_REPLY:
            message = f"{self._server} sent a reply of another form"
            raise ToolError(message, kind="bad_reply", retry=False, own_fault=True) from None

    async def execute(self, content: str, *, timeout: float) -> str:
        query = one_line(content, MAX_QUERY_CHARS + 1)
        if not query:
            raise ToolError("The search query is empty.", kind="empty_query", retry=False)
        if len(query) > MAX_QUERY_CHARS:
            message = f"The search query has more than {MAX_QUERY_CHARS} characters."
            raise ToolError(message, kind="long_query", retry=False)
        key = f"{query}\n{self._settings} {self.max_results} {self.result_length}"
        if self._cache and (text := await self._cached(self._cache.get, key)):
            return neutral(text)
        passages = await self._search(query, timeout)
        text = passages_text(passages[: self.max_results], self.result_length)
        if self._cache and passages:
            await self._cached(self._cache.put, key, text)
        return text

    async def close(self) -> None:
        if self._client:
            await self._client.aclose()
        if self._cache:
            self._cache.close()

    async def _cached(self, operation, *args) -> str | None:
        """Run an operation of the cache and return its result; log an error once per kind and return None."""
        try:
            return await asyncio.to_thread(operation, *args)
        except sqlite3.Error as error:
            kind = f"{type(error).__name__}: {error}"
            if kind not in self._cache_faults:
                self._cache_faults.add(kind)
                logger.warning("search cache %s: %s; searching without it where it fails", self._cache.path, kind)
            return None


@dataclass(kw_only=True, eq=False, repr=False)
class LocalSearchTool(SearchTool):
    """A BM25 search over a corpus, in this process or on a server (scripts/search_server.py).

    Args:
        corpus: path of a corpus (bm25_index.py).
        index: folder in which its index is kept and from which all processes map it; by default each builds its own.
        url: address of a search server instead of a corpus: `http://host:8000` or `http://host:8000/retrieve`.
    """

    corpus: str | Path | None = None
    index: str | Path | None = None
    url: str | None = None

    _server = "The search server"

    def __post_init__(self):
        self.check(self.corpus, self.index, self.url)
        super().__post_init__()
        self._settings, self._index = f"bm25 {self.url}", None
        if self.corpus is not None:
            corpus = Path(self.corpus).expanduser().resolve()
            file = corpus.stat()
            self._settings = f"bm25 {corpus} {file.st_size} {file.st_mtime_ns}"
            from verl.workers.rollout.tools.search import bm25_index  # the import of numba takes seconds

            self._index = bm25_index.open_index(self.corpus, self.index)
        else:
            self._url = checked_url(self.url, "url")
            if self._url.path in ("", "/"):
                self._url = self._url.copy_with(path="/retrieve")
            self._client = json_client(self._url)

    @classmethod
    def check(cls, corpus=None, index=None, url=None, **others) -> None:
        if (corpus is None) == (url is None) or (index is not None and corpus is None):
            raise ValueError(f"expected corpus (and index), or url; got {corpus=}, {index=}, {url=}")
        if corpus is not None and not Path(corpus).expanduser().exists():
            raise ValueError(f"corpus={corpus} does not exist")

    async def _search(self, query: str, timeout: float) -> list[Passage]:
        if self._index is not None:
            ranked = await asyncio.to_thread(self._index.search, query, self.max_results)
            return [Passage(document.title, document.text) for document, _ in ranked]
        wait, end = FIRST_WAIT, time.monotonic() + timeout
        while True:  # a busy server (status 503) is asked again
            try:
                return await super()._search(query, end - time.monotonic())
            except ToolError as error:
                if error.kind != "http_503" or time.monotonic() + wait > end:
                    raise
            await asyncio.sleep(wait * random.uniform(0.5, 1))
            wait = min(2 * wait, LONGEST_WAIT)

    def _payload(self, query: str) -> dict:
        return {"queries": [query], "topk": self.max_results, "return_scores": True}

    def _passages(self, reply: Any) -> list[Passage]:
        (results,) = reply["result"]
        contents = (result["document"]["contents"].partition("\n") for result in results)
        return [Passage(title.strip().strip('"'), text) for title, _, text in contents]


@dataclass(kw_only=True, eq=False, repr=False)
class BingSearchTool(SearchTool):
    """A Bing search through Bright Data's SERP API, in its parsed form (brd_json); a page has about ten results. No
    message shows the key.

    Args:
        api_key: key of the API; None for the environment's BRIGHTDATA_API_KEY, which is safer: configs are logged.
        zone: zone of the API; None for the environment's BRIGHTDATA_ZONE.
        location: two-letter code of the country from which to search, Bing's `cc`.
        endpoint: address of the API: https, or http on this machine.
    """

    api_key: InitVar[str | None] = None
    zone: str | None = None
    max_results: int = 10
    location: str = "cn"
    endpoint: str = "https://api.brightdata.com/request"

    _server = "The web search"

    def __post_init__(self, api_key: str | None):
        key = _setting("api_key", "BRIGHTDATA_API_KEY", api_key)
        self.zone, location = _setting("zone", "BRIGHTDATA_ZONE", self.zone), self.location
        if not (isinstance(location, str) and len(location) == 2 and location.isascii() and location.isalpha()):
            raise ValueError(f"location must be a two-letter country code, got {location!r}")
        self._url = checked_url(self.endpoint, "endpoint")
        if self._url.scheme != "https" and not is_loopback(self._url):
            raise ValueError(f"endpoint must be https, since it is sent the key, got {self.endpoint!r}")
        super().__post_init__()
        self._settings = f"bing {location.lower()}"
        # Only the client holds the key, and its repr hides it.
        self._client = json_client(self._url, {"Authorization": f"Bearer {key}"})

    @classmethod
    def check(cls, api_key=None, zone=None, **others) -> None:
        _setting("api_key", "BRIGHTDATA_API_KEY", api_key)
        _setting("zone", "BRIGHTDATA_ZONE", zone)

    def _payload(self, query: str) -> dict:
        page = "https://www.bing.com/search?" + urlencode({"q": query, "cc": self.location, "brd_json": 1})
        return {"zone": self.zone, "url": page, "format": "raw"}

    def _passages(self, reply: Any) -> list[Passage]:
        if not reply.keys() & {"organic", "general"}:  # a page without results lacks the former
            raise ValueError("expected general or organic")
        passages = []
        for result in reply.get("organic") or []:
            title, text, link = (result.get(key) or "" for key in ("title", "description", "link"))
            if not all(isinstance(value, str) for value in (title, text, link)):
                raise TypeError("title, description and link must be text")
            if title or text:
                passages.append(Passage(title, text, httpx.URL(link).host))
        return passages


def _setting(key: str, variable: str, value: str | None) -> str:
    """Return a setting from parameter or environment; raise ValueError, without the value, if neither is usable."""
    value = value or os.environ.get(variable)
    if not value:
        raise ValueError(f"{key}: set it in the environment as {variable}")
    if not isinstance(value, str) or not (value.isascii() and value.isprintable()) or " " in value:
        raise ValueError(f"{key}: expected printable ASCII without blanks (the value is not shown)")
    return value
