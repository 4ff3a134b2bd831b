"""scripts/view_trees.py: what the page holds, that model-written text stays text, and errors by name.

The test that opens the page needs a Chromium on the PATH; it is skipped where there is none.
"""

import base64
import hashlib
import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.scripts.loading import load_script
from tests.tables import table

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = (
    "</script><script>document.title = 'owned'</script><!-- <script> \u2028\u2029 \ud83d \u202e & <img src=x onerror=1>"
)


class Scripts(HTMLParser):
    """Collects the page's script elements by id, the one without an id as "", and all tags."""

    def __init__(self, page: str):
        super().__init__(convert_charrefs=False)
        self.elements, self.tags, self.policy = {}, [], None
        self.at = None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"]
        if tag == "script":
            self.at = attributes.get("id", "")
            assert self.at not in self.elements and set(attributes) <= {"id", "type"}
            self.elements[self.at] = ""

    def handle_endtag(self, tag):
        if tag == "script":
            self.at = None

    def handle_data(self, data):
        if self.at is not None:
            self.elements[self.at] += data


def segment(parent, token_ids, log_probs=None, author="model", **info) -> dict:
    return {"parent": parent, "token_ids": token_ids, "log_probs": log_probs, "author": author, "info": info}


def a_tree(**changes) -> dict:
    """ "3+4" forks into "*2", "-1" (each a trajectory, the first one twice) and a pruned "/"."""
    segments = [
        segment(None, [3, 10, 4], [-0.5, -1.0, -0.25]),
        segment(0, [11, 2], [-0.1, -0.2], value=0.75),
        segment(0, [12, 1], [-3.0, -99.0]),
        segment(0, [13], [-2.0], pruned="edit distance", pruned_step=4),
        segment(2, [90_000], None, "tool"),
    ]
    vocabulary = {"1": "1", "2": "2", "3": "3", "4": "4", "10": "+", "11": "*", "12": "-", "13": "/", "90000": "\n"}
    tree = {"step": 12, "uid": "a", "prompt": "make 7", "rewards": [1.0, 0.0, 1.0], "segments": segments}
    return tree | {"leaves": [1, 4, 1], "metrics": {"pruning_ratio": 0.25}, "vocabulary": vocabulary} | changes


def write_trees(run: Path, step: int, trees: list) -> Path:
    (run / "trees").mkdir(parents=True, exist_ok=True)
    lines = [tree if isinstance(tree, str) else json.dumps(tree) for tree in trees]
    (run / "trees" / f"step_{step:06d}.jsonl").write_text("\n".join(lines) + "\n")
    return run


def page_of(run: Path, *options: str) -> tuple[str, dict]:
    """The page's text, and the data in it by the element's id."""
    load_script("view_trees").main([str(run), *options])
    page = (run / "trees.html").read_text(encoding="utf-8")
    scripts = Scripts(page).elements
    return page, {name: json.loads(text) for name, text in scripts.items() if name}


def segment_texts(data: dict) -> list[list[str]]:
    return [[data["vocabulary"][str(token)] for token in entry["tokens"]] for entry in data["segments"]]


def error_of(run: Path, *options: str) -> str:
    with pytest.raises(SystemExit) as error:
        load_script("view_trees").main([str(run), *options])
    assert str(error.value).startswith("error: ")
    return str(error.value)


# ---- what the page holds ----


def test_the_page_holds_the_trees(tmp_path, capsys):
    write_trees(tmp_path, 2, [a_tree(prompt="two")])
    write_trees(tmp_path, 12, [a_tree(update="tree"), a_tree(prompt="other", rewards=[0.0, 0.0, 0.5])])
    page, data = page_of(tmp_path)
    assert capsys.readouterr().out.strip() == str(tmp_path / "trees.html")
    assert set(data) == {"tree-2-0", "tree-12-0", "tree-12-1", "index"}
    assert [(entry["step"], len(entry["prompts"])) for entry in data["index"]["steps"]] == [(2, 1), (12, 2)]
    assert data["index"]["title"] == tmp_path.name
    tree = data["tree-12-0"]
    assert segment_texts(tree) == [["3", "+", "4"], ["*", "2"], ["-", "1"], ["/"], ["\n"]]
    costs = [entry["costs"] for entry in tree["segments"]]
    assert costs == [[500, 1000, 250], [100, 200], [3000, 99_000], [2000], [None]]
    assert [entry["parent"] for entry in tree["segments"]] == [None, 0, 0, 0, 2]
    assert tree["segments"][3]["info"] == {"pruned": "edit distance", "pruned_step": 4}
    assert tree["segments"][4]["author"] == "tool"
    assert tree["leaves"] == [1, 4, 1] and tree["rewards"] == [1.0, 0.0, 1.0] and tree["update"] == "tree"


def test_steps_and_output_are_chosen(tmp_path, capsys):
    for step in (1, 2, 3):
        write_trees(tmp_path / "run", step, [a_tree()])
    output = tmp_path / "deep" / "page.html"
    load_script("view_trees").main([str(tmp_path / "run"), "--output", str(output), "--steps", "3", "1"])
    assert set(Scripts(output.read_text()).elements) == {"tree-1-0", "tree-3-0", "index", ""}
    assert [path.name for path in output.parent.iterdir()] == ["page.html"]
    message = error_of(tmp_path / "run", "--steps", "1", "7")
    assert "no trees of step 7; there are 1, 2, 3" in message


@pytest.mark.parametrize(
    "tree",
    [
        a_tree(segments=[segment(None, [1])], leaves=[0], rewards=[1]),
        a_tree(segments=[segment(None, [1, 2], [-1.0, -2.0])], leaves=[0] * 8, rewards=[0.5] * 8),
        a_tree(segments=[segment(None, []), segment(0, [], [])], leaves=[0, 1], rewards=[0.0, None]),
        a_tree(segments=[segment(None, [1]), segment(0, [2])], leaves=[0, 1], rewards=[-1.0, 2.0]),
        a_tree(segments=[], leaves=[], rewards=[]),
        {key: value for key, value in a_tree().items() if key not in ("metrics", "vocabulary", "uid")},
    ],
    ids=["one trajectory", "all the same", "empty segments", "one ends inside another", "nothing", "least keys"],
)
def test_odd_trees_are_taken(tmp_path, tree):
    _, data = page_of(write_trees(tmp_path, 1, [tree]))
    assert data["tree-1-0"]["rewards"] == tree["rewards"]
    assert all(len(entry["tokens"]) == len(entry["costs"]) for entry in data["tree-1-0"]["segments"])


def test_numbers_that_json_lacks_become_unknown(tmp_path):
    odd = a_tree(metrics={"a": float("nan")}, rewards=[float("inf"), 0.0, 1.0])
    odd["segments"][0]["log_probs"] = [float("nan"), float("-inf"), -1.0]
    _, data = page_of(write_trees(tmp_path, 1, [odd]))
    assert data["tree-1-0"]["metrics"] == {"a": None} and data["tree-1-0"]["rewards"] == [None, 0.0, 1.0]
    assert data["tree-1-0"]["segments"][0]["costs"] == [None, None, 1000]


# ---- hostile text ----


def hostile_tree() -> dict:
    tree = a_tree(prompt=HOSTILE, uid=HOSTILE, metrics={HOSTILE: 1.0})
    tree["vocabulary"]["10"] = HOSTILE
    tree["segments"][1]["info"] = {HOSTILE: HOSTILE}
    tree["segments"][3]["info"]["pruned"] = HOSTILE
    return tree


def test_hostile_text_stays_inside_its_data_element(tmp_path):
    plain, _ = page_of(write_trees(tmp_path / "plain", 1, [a_tree()]))
    page, data = page_of(write_trees(tmp_path / "hostile", 1, [hostile_tree()]))
    assert Scripts(page).tags == Scripts(plain).tags
    assert page.count("<!") == plain.count("<!") == 1  # the doctype
    assert page.lower().count("</script") == plain.lower().count("</script")
    assert data["tree-1-0"]["prompt"] == HOSTILE and segment_texts(data["tree-1-0"])[0][1] == HOSTILE
    assert not any(character in page for character in "\u2028\u2029\u202e")


def test_only_the_pages_own_script_may_run_and_nothing_is_fetched(tmp_path):
    page, _ = page_of(write_trees(tmp_path, 1, [hostile_tree()]))
    scripts = Scripts(page)
    policy = dict(rule.strip().split(" ", 1) for rule in scripts.policy.split(";"))
    own = base64.b64encode(hashlib.sha256(scripts.elements[""].encode()).digest()).decode()
    assert policy["default-src"] == "'none'" and policy["script-src"] == f"'sha256-{own}'"
    assert "unsafe" not in scripts.policy
    template = (ROOT / "scripts" / "view_trees.html").read_text()
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "http://", "https://", "fetch("):
        assert way not in template


# ---- errors ----


def test_a_missing_run_and_missing_trees_are_named(tmp_path):
    assert f"{tmp_path / 'nowhere'}: no such run folder" in error_of(tmp_path / "nowhere")
    for message in (error_of(tmp_path), (tmp_path / "trees").mkdir() or error_of(tmp_path)):
        assert str(tmp_path / "trees") in message and "trainer.tree_freq" in message and "recipe/latr" in message
    (tmp_path / "trees" / "step_000003.jsonl").touch()
    assert "step_000003.jsonl: no trees" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [('{"step": 1, "prompt', "JSONDecodeError"), ("[1]", "TypeError"), ({"step": 1}, "KeyError('prompt')")],
)
def test_damaged_lines_are_refused_by_file_and_line_and_leave_the_old_page(tmp_path, line, message):
    (tmp_path / "trees.html").write_text("old")
    output = error_of(write_trees(tmp_path, 3, [a_tree(), line]))
    assert "step_000003.jsonl, line 2: " in output and message in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trees", "trees.html"]
    assert (tmp_path / "trees.html").read_text() == "old"


# ---- in a browser ----


def opened(page: Path, address: str, profile: Path) -> str:
    """The page's elements after its script has run, without the data elements."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip("no chromium to look with")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--virtual-time-budget=3000"]
    command = [browser, *flags, "--window-size=1400,900", "--dump-dom", f"{page.as_uri()}#{address}"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    return output[: output.index('<script type="application/json"')]


@pytest.mark.parametrize(("address", "expected"), table(__file__, "addresses"))
def test_the_page_opens_at_its_address(tmp_path, address, expected):
    write_trees(tmp_path / "run", 9, [a_tree(segments=[], leaves=[], rewards=[]), hostile_tree()])
    write_trees(tmp_path / "run", 12, [a_tree(prompt="the newest", update="tree"), a_tree()])
    page_of(tmp_path / "run")
    output = opened(tmp_path / "run" / "trees.html", address, tmp_path / "profile")
    assert 'data-state="ready"' in output and '<div id="error" hidden=""></div>' in output
    assert "<title>Trees of run</title>" in output
    for text in expected:
        assert text in output
