r"""A BM25 index of a corpus: built once, kept in a folder, memory-mapped by any number of processes.

    index = open_index("corpus.jsonl", "corpus.index")       # built if the folder does not exist
    index.search("who tends otters", 3)                       # -> [(Document, score), …], best first

A corpus is a .jsonl, .jsonl.gz or .parquet file with one document per row; other keys are ignored:

    {"id": "17", "title": "Otter", "text": "The otter is …"}          # id: text or an integer; title may be absent
    {"id": "18", "contents": "\"Heron\"\nThe heron is …"}          # as in wiki-18: first line the title, in quotes

score(q, d) = Σ over distinct words w of q: ln(1 + (N - n_w + 0.5) / (n_w + 0.5)) · f / (f + k1 · (1 - b + b · |d| / L))
with f = how often w is in d, n_w = documents with w, |d| = words of d, L = their mean: Lucene's BM25, Anserini's k1 and
b. Title and text count equally; English function words do not count. Of equal scores, the earlier document is first.
"""

import hashlib
import json
import logging
import os
import re
import unicodedata
from itertools import islice
from pathlib import Path
from typing import NamedTuple

# bm25s calls JAX when it is imported, if it is installed, and JAX would take three quarters of a GPU's memory.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import bm25s
import numpy as np
import pyarrow as pa
from bm25s.stopwords import STOPWORDS_EN

from verl.utils.atomic_files import new_folder
from verl.utils.data_files import read_rows

K1, B = 0.9, 0.4
FORMAT = 1
BLOCK = 256
MAX_QUERY_WORDS = 64
ROWS_PER_BATCH = 10_000
SCHEMA = pa.schema([(name, pa.large_string()) for name in ("id", "title", "text")])
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
WORD = re.compile(f"[{CJK}]|[^\\W{CJK}]+")
FUNCTION_WORDS = frozenset(STOPWORDS_EN)

logging.getLogger("bm25s").setLevel(logging.WARNING)  # bm25s sets its own logger to DEBUG


def words(text: str) -> list[str]:
    """Return a text's words in lower case, each Chinese or Japanese character as one, without English function
    words."""
    folded = text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).lower()
    return [word for word in WORD.findall(folded) if word not in FUNCTION_WORDS]


class Document(NamedTuple):
    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Return the title in quotes and the text, on separate lines, as in wiki-18."""
        return f'"{self.title}"\n{self.text}'


def read_corpus(path: str | Path) -> pa.Table:
    """Return a corpus file's documents in order, with columns id, title and text (`SCHEMA`); a ValueError names the
    file and the wrong row, numbered from 1 without blank lines."""
    path = Path(path).expanduser()
    if not path.name.endswith((".jsonl", ".jsonl.gz", ".parquet")):
        raise ValueError(f"{path}: expected a corpus in .jsonl, .jsonl.gz or .parquet")
    rows = read_rows(path, columns=("id", "title", "text", "contents"))
    documents = (_document(row, f"{path}, row {number}") for number, row in enumerate(rows, start=1))
    batches = []
    while columns := list(zip(*islice(documents, ROWS_PER_BATCH), strict=True)):
        batches.append(pa.record_batch([pa.array(column, pa.large_string()) for column in columns], SCHEMA))
    if not batches:
        raise ValueError(f"{path}: no documents")
    return pa.Table.from_batches(batches)


def _document(row: dict, where: str) -> Document:
    row = {key: value for key, value in row.items() if value is not None}
    if type(row.get("id")) not in (str, int):
        raise ValueError(f"{where}: id: expected text or an integer, got {row.get('id')!r}")
    if "text" not in row and isinstance(row.get("contents"), str):
        title, _, text = row["contents"].partition("\n")
        row |= {"title": title.strip().strip('"'), "text": text}
    document = Document(str(row["id"]), row.get("title", ""), row.get("text"))
    for key, value in document._asdict().items():
        if not isinstance(value, str):
            raise ValueError(f"{where}: {key}: expected text, got {type(value).__name__}; keys: {', '.join(row)}")
    return document


class Bm25Index:
    """An index in which several threads may search at once."""

    def __init__(self, documents: pa.Table, scorer: bm25s.BM25):
        self.documents, self._scorer = documents, scorer

    def __len__(self) -> int:
        return self.documents.num_rows

    @classmethod
    def build(cls, documents: pa.Table) -> "Bm25Index":
        """Index the documents of `read_corpus`, at least one of which must contain a word."""
        vocabulary: dict[str, int] = {}
        word_ids = [
            [vocabulary.setdefault(word, len(vocabulary)) for word in words(f"{title}\n{text}")]
            for batch in documents.to_batches()
            for title, text in zip(batch["title"].to_pylist(), batch["text"].to_pylist(), strict=True)
        ]
        if not vocabulary:
            raise ValueError("the corpus has no words to search for")
        scorer = bm25s.BM25(method="lucene", k1=K1, b=B)
        scorer.index((word_ids, vocabulary), create_empty_token=False, show_progress=False)
        return cls(documents, scorer)

    def search(self, query: str, k: int) -> list[tuple[Document, float]]:
        """Return at most k documents with their scores, best first; the query's first 64 distinct words count."""
        word_ids = self._scorer.get_tokens_ids(list(dict.fromkeys(words(query)))[:MAX_QUERY_WORDS])
        if not word_ids:
            return []
        scores = self._scorer.get_scores_from_ids(word_ids)
        return [
            (Document(*(column[int(i)].as_py() for column in self.documents.columns)), float(scores[i]))
            for i in best(scores, k)
        ]

    def save(self, folder: Path, corpus_hash: str) -> None:
        """Write the index as a new folder, all or nothing, with the SHA-256 of its corpus."""
        with new_folder(folder) as unfinished:
            self._scorer.save(unfinished, show_progress=False)
            with pa.OSFile(str(unfinished / "documents.arrow"), "wb") as file:
                with pa.ipc.new_file(file, self.documents.schema) as writer:
                    writer.write_table(self.documents)
            (unfinished / "manifest.json").write_text(json.dumps(_manifest(corpus_hash), indent=1))

    @classmethod
    def load(cls, folder: Path, corpus_hash: str | None = None) -> "Bm25Index":
        """Map a saved index into memory; raise ValueError if it is of another corpus, if one is given, or format."""
        file = folder / "manifest.json"
        manifest = json.loads(file.read_text()) if file.exists() else {}
        if manifest | _manifest(corpus_hash or manifest.get("corpus_sha256", "")) != manifest:
            raise ValueError(
                f"{folder}: no search index, or one of another corpus or version; delete the folder to have it made "
                "again, or name another"
            )
        documents = pa.ipc.open_file(pa.memory_map(str(folder / "documents.arrow"))).read_all()
        return cls(documents, bm25s.BM25.load(folder, mmap=True))


def best(scores: np.ndarray, k: int) -> np.ndarray:
    """Return the positions of the k highest positive scores, highest first; equal scores in order of position."""
    maxima = np.maximum.reduceat(scores, np.arange(0, len(scores), BLOCK))
    # At least k scores reach this bound, so none of the k best is lower; most documents are excluded without sorting.
    bound = np.partition(maxima, -k)[-k] if len(maxima) > k else 0
    candidates = np.flatnonzero((scores >= bound) & (scores > 0))
    return candidates[np.argsort(-scores[candidates], kind="stable")[:k]]


def open_index(corpus: str | Path, folder: str | Path | None = None) -> Bm25Index:
    """Return the index of a corpus: loaded from `folder` if it exists, else built and, with a folder, saved."""
    corpus = Path(corpus).expanduser()
    if folder is None:
        return Bm25Index.build(read_corpus(corpus))
    folder, digest = Path(folder).expanduser(), hashlib.sha256()
    with corpus.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    corpus_hash = digest.hexdigest()
    if not folder.exists():
        index = Bm25Index.build(read_corpus(corpus))
        try:
            index.save(folder, corpus_hash)
        except OSError:
            if not (folder / "manifest.json").exists():  # otherwise another process has saved it first
                raise
    return Bm25Index.load(folder, corpus_hash)


def _manifest(corpus_hash: str) -> dict:
    return {"format": FORMAT, "bm25s": bm25s.__version__, "k1": K1, "b": B, "corpus_sha256": corpus_hash}
