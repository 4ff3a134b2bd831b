"""The index: ranking against the formula written out; corpora and kept indexes that are damaged or of another kind."""

import gzip
import json
import math
import os
import random
import re
import subprocess
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.fresh import python_for
from tests.tables import table
from tests.workers.rollout.tools.search.animals import ANIMALS, write_jsonl
from verl.workers.rollout.tools.search.bm25_index import SCHEMA, Bm25Index, best, open_index, read_corpus


def corpus(texts):
    return pa.table([[f"{i}" for i in range(len(texts))], [""] * len(texts), list(texts)], schema=SCHEMA)


def formula(texts, query, k1=0.9, b=0.4):
    """BM25 as Lucene has it, slowly, for words split at blanks."""
    documents = [Counter(text.split()) for text in texts]
    lengths = [document.total() for document in documents]
    scores = []
    for counts, length in zip(documents, lengths, strict=True):
        score = 0.0
        for word in set(query.split()):
            n = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
            f = counts[word]
            score += idf * f / (f + k1 * (1 - b + b * length * len(lengths) / sum(lengths)))
        scores.append(score)
    return scores


# ---------------------------------------------------------------- ranking


@pytest.mark.parametrize("seed", range(3))
def test_ranking_is_the_formula(seed):
    rng = random.Random(seed)
    vocabulary = [f"w{i}" for i in range(60)]
    texts = [" ".join(rng.choices(vocabulary[: rng.randint(5, 60)], k=rng.randint(1, 40))) for _ in range(100)]
    index = Bm25Index.build(corpus(texts))
    for _ in range(10):
        query = " ".join(rng.choices([*vocabulary, "unknown"], k=rng.randint(1, 8)))
        expected = formula(texts, query)
        actual = index.search(query, 10)
        assert [score for _, score in actual] == pytest.approx(sorted(filter(None, expected), reverse=True)[:10])
        for document, score in actual:
            assert score == pytest.approx(expected[int(document.id)])


def test_of_equal_scores_the_earlier_comes_first():
    """More documents than in a block, most scores several times."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        n, k = int(rng.integers(1, 3000)), int(rng.integers(1, 30))
        scores = (rng.integers(0, rng.integers(1, 60), n) / 7).astype(np.float32)
        scores[rng.random(n) < rng.random()] = 0
        ranked = sorted((i for i in range(n) if scores[i] > 0), key=lambda i: (-scores[i], i))
        assert best(scores, k).tolist() == ranked[:k]


def test_words_that_match():
    index = Bm25Index.build(corpus(["Straße ÉCOLE 東京タワー", "x1 the of", "", "a", "snake_case"]))
    for query, expected in {
        "école": ["0"],
        "STRASSE": [],
        "straße?!": ["0"],
        "京": ["0"],
        "X1": ["1"],
        "the": [],
        "case": [],
        "": [],
        "<>&\x00": [],
        "\ud800": [],
        "otter " * 10_000: [],
        "Ｘ１": ["1"],  # full width
    }.items():
        assert [document.id for document, _ in index.search(query, 5)] == expected, query
    with pytest.raises(ValueError, match="no words"):
        Bm25Index.build(corpus(["", "the of", "!"]))


def test_only_the_first_64_distinct_words_count():
    index = Bm25Index.build(corpus(["otter", "heron"]))
    filler = " ".join(f"w{i}" for i in range(63))
    assert [d.id for d, _ in index.search(f"{filler} {filler} otter heron", 5)] == ["0"]


# ---------------------------------------------------------------- corpora and kept indexes


def test_corpora_of_every_form_are_the_same(tmp_path):
    plain = read_corpus(write_jsonl(tmp_path / "c.jsonl", ANIMALS))
    assert plain.to_pylist()[2] == {"id": "x3", "title": "Mole", "text": "The mole digs.\nIt has small eyes."}
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, ANIMALS)) + "\n\n")
    rows = [row | {"id": str(row["id"])} for row in ANIMALS]
    schema = pa.schema([(key, pa.string()) for key in ("id", "title", "text", "contents")])
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "c.parquet")
    assert read_corpus(tmp_path / "c.jsonl.gz").equals(plain) and read_corpus(tmp_path / "c.parquet").equals(plain)


@pytest.mark.parametrize("line, fault", [*table(__file__, "bad rows"), ("[" * 200_000, "recursion")])
def test_a_bad_row_is_named(tmp_path, line, fault):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(ANIMALS[0]) + "\n\n" + line + "\n")
    with pytest.raises(ValueError, match=rf"c\.jsonl, (line 3|row 2): .*{re.escape(fault)}"):
        read_corpus(path)


def test_files_that_are_no_corpus(tmp_path):
    for name, content in {
        "empty.jsonl": b"\n\n",
        "c.csv": b"id,text\n",
        "c.parquet": b"PAR1 not really",
        "c.jsonl.gz": b"no gzip",
        "cut.jsonl.gz": gzip.compress(b'{"id": 1, "text": "x"}\n')[:-9],
        "latin.jsonl": b'{"id": 1, "text": "\xe9"}',
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(name)):
            read_corpus(tmp_path / name)
    pq.write_table(pa.table({"id": [1, 2], "text": ["a", None]}), tmp_path / "null.parquet")
    with pytest.raises(ValueError, match="null.parquet, row 2: text"):
        read_corpus(tmp_path / "null.parquet")
    with pytest.raises(ValueError, match="absent.jsonl does not exist"):
        read_corpus(tmp_path / "absent.jsonl")


def test_a_kept_index_answers_the_same_and_belongs_to_its_corpus(tmp_path):
    corpus, folder = write_jsonl(tmp_path / "c.jsonl", ANIMALS), tmp_path / "deep" / "index"
    fresh = open_index(corpus).search("fish water", 3)
    assert open_index(corpus, folder).search("fish water", 3) == fresh
    made = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert open_index(corpus, folder).search("fish water", 3) == fresh
    assert made == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}, "made again"
    assert [path.name for path in folder.parent.iterdir()] == ["index"], "something temporary is left"

    write_jsonl(corpus, ANIMALS[:2])
    with pytest.raises(ValueError, match="index: no search index, or one of another corpus"):
        open_index(corpus, folder)


def test_a_damaged_index_and_a_folder_of_something_else(tmp_path):
    corpus, folder = write_jsonl(tmp_path / "c.jsonl", ANIMALS), tmp_path / "index"
    open_index(corpus, folder)
    with (folder / "documents.arrow").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ValueError, match="Arrow"):
        open_index(corpus, folder)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="home: no search index"):
        open_index(corpus, tmp_path / "home")
    assert (tmp_path / "home" / "thesis.tex").exists()


def test_jax_takes_no_gpu(tmp_path):
    """bm25s tries JAX when it is imported; on a GPU JAX would reserve most of the memory for its process."""
    (tmp_path / "jax.py").write_text("import os\nprint(os.environ['JAX_PLATFORMS'])\nraise ImportError\n")
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        python_for("import sys; sys.path.insert(0, sys.argv[1]); import verl.workers.rollout.tools.search.bm25_index")
        + [str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0 and "cpu" in done.stdout.split(), done.stdout + done.stderr
