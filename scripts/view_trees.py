"""Writes an HTML page that shows the rollout trees of a run: their forks, pruned branches and rewards.

    python scripts/view_trees.py outputs/latr --steps 1 20 40

Each line of `RUN/trees/step_000012.jsonl` is a prompt's tree: the record of `verl.workers.rollout.trajectory_tree` with
the step, the prompt's text, a reward for each trajectory and the tokens' texts. The page needs no network or server.
In its address, `#step=12&prompt=3&leaf=2` shows the second trajectory of the step's third tree, and `&segment=17` the
branch through segment 17 of the file, pruned or not.
"""

import argparse
import base64
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from verl.utils.atomic_files import replacing

TEMPLATE = Path(__file__).with_name("view_trees.html")
METRICS_PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
STEP_FILE = re.compile(r"step_(\d+)\.jsonl")
LARGE_PAGE = 50_000_000
UNKNOWN_COST = 65_535


def tree_files(run: Path, steps: Iterable[int] | None = None) -> dict[int, Path]:
    """Return the file of trees of each step, in order of steps; all steps by default."""
    if not run.is_dir():
        raise FileNotFoundError(f"{run}: no such run folder")
    folder = run / "trees"
    matches = [(STEP_FILE.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else [])]
    files = dict(sorted((int(match[1]), path) for match, path in matches if match))
    if not files:
        raise FileNotFoundError(
            f"{folder}: no trees (step_000012.jsonl, …); a run with tree rollouts (such as recipe/latr) writes them "
            "every trainer.tree_freq steps, if that is positive"
        )
    if absent := sorted(set(steps or []) - files.keys()):
        raise FileNotFoundError(f"{folder}: no trees of step {absent[0]}; there are {', '.join(map(str, files))}")
    return {step: path for step, path in files.items() if not steps or step in steps}


def read_trees(path: Path) -> Iterator[dict]:
    """Yield the trees of a file, each in the page's form (see `compact`)."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                # Training may log NaN, which is not valid JSON: it is read as None.
                tree = compact(json.loads(line, parse_constant=lambda name: None))
            except (ValueError, TypeError, LookupError) as error:
                raise ValueError(f"{path}, line {number}: not a run's tree: {error!r}") from error
            yield tree


def compact(tree: dict) -> dict:
    """Return the tree in the page's form, which takes about 5.4 bytes a token.

    `tokens` holds the concatenated tokens of all segments as indices into `vocabulary` (pairs of token id, and text or
    None), as base64 of little-endian integers of `width` bytes. `costs` holds -1000 times the log-probabilities, at
    most 65,534, as base64 of 2-byte integers; 65,535 stands for an unknown log-probability.
    """
    segments, texts = tree["segments"], tree.get("vocabulary", {})
    ids = [token for segment in segments for token in segment["token_ids"]]
    unique_ids, indices = np.unique(np.array(ids, dtype=np.int64), return_inverse=True)
    others: dict[tuple, int] = {}  # (token id, another text than the usual one) -> its index
    starts = np.cumsum([0, *(len(segment["token_ids"]) for segment in segments)])
    for start, segment in zip(starts.tolist(), segments, strict=False):
        for at, text in segment.get("texts", ()):
            indices[start + at] = others.setdefault((ids[start + at], text), len(unique_ids) + len(others))
    vocabulary = [[token, texts.get(str(token))] for token in unique_ids.tolist()] + [list(pair) for pair in others]
    known = [None if segment.get("author") == "tool" else segment.get("log_probs") for segment in segments]
    costs = [c for own, s in zip(known, segments, strict=True) for c in own or [None] * len(s["token_ids"])]
    costs = np.round(np.array(costs, dtype=float) * -1000)
    costs = np.where(np.isnan(costs), UNKNOWN_COST, np.clip(costs, 0, UNKNOWN_COST - 1))
    width = 2 if len(vocabulary) <= 65_536 else 4
    return {
        "uid": tree.get("uid", ""),
        "prompt": tree["prompt"],
        "rewards": tree["rewards"],
        "metrics": tree.get("metrics", {}),
        "update": tree.get("update", ""),
        "leaves": tree["leaves"],
        "vocabulary": vocabulary,
        "width": width,
        "tokens": base64.b64encode(indices.astype(f"<u{width}").tobytes()).decode(),
        "costs": base64.b64encode(costs.astype("<u2").tobytes()).decode(),
        "segments": [
            {
                "parent": segment.get("parent"),
                "length": len(segment["token_ids"]),
                "author": segment.get("author", "model"),
                # earlier versions of LATR wrote candidates that had no place
                "info": {key: value for key, value in (segment.get("info") or {}).items() if key != "suppressed"},
            }
            for segment in segments
        ],
    }


def metric_meanings(names: Iterable[str]) -> dict[str, str]:
    """Return name -> meaning for those of these metrics that docs/metrics.md explains as `tree/<name>`. If a row
    explains several, each gets its part between semicolons, or the whole text if their numbers differ."""
    meanings = {}
    page = METRICS_PAGE.read_text(encoding="utf-8")
    for explained, text in re.findall(r"^\| (`tree/.*?) \| (.*) \|$", page, flags=re.MULTILINE):
        patterns = [re.escape(name).replace("<name>", "[^/]+") for name in re.findall("`tree/([^`]+)`", explained)]
        text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", text).replace("`", "")
        parts = text.split("; ")
        for i, pattern in enumerate(patterns):
            meaning = parts[i] if len(parts) == len(patterns) else text
            meanings |= {name: meaning for name in names if re.fullmatch(pattern, name)}
    return meanings


def data_element(name: str, data) -> str:
    """Return a script element with id `name` and `data` as ASCII JSON, escaped so that no text can end the element."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def content_policy(template: str) -> str:
    """Return a content security policy that allows only the template's own script and style, and no network access."""
    hashes = {}
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", template, flags=re.DOTALL)
        hashes[tag] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    allowed = "; ".join(f"{tag}-src 'sha256-{value}'" for tag, value in hashes.items())
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def write_page(title: str, files: dict[int, Path], output: Path) -> int:
    """Write the page tree by tree, so that memory holds a single tree. Return the page's size in bytes."""
    template = TEMPLATE.read_text(encoding="utf-8")
    before, after = template.replace("{{policy}}", content_policy(template)).split("{{data}}")
    steps, metrics = [], set()
    with replacing(output) as unfinished, unfinished.open("w", encoding="utf-8", newline="\n") as page:
        page.write(before)
        for step, path in files.items():
            prompts = []
            for tree in read_trees(path):
                page.write(data_element(f"tree-{step}-{len(prompts)}", tree))
                metrics |= tree["metrics"].keys()
                prompts.append({"prompt": tree["prompt"][:80], "rewards": tree["rewards"]})
            if prompts:
                steps.append({"step": step, "prompts": prompts})
        if not steps:
            raise ValueError(f"{', '.join(map(str, files.values()))}: no trees, the files are empty")
        page.write(data_element("index", {"title": title, "steps": steps, "meanings": metric_meanings(metrics)}))
        page.write(after)
        size = page.tell()
    return size


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder")
    parser.add_argument("--output", type=Path, help="page to write; default: trees.html in the run folder")
    parser.add_argument("--steps", type=int, nargs="+", help="only these training steps; default: all")
    options = parser.parse_args(arguments)
    output = options.output or options.run / "trees.html"
    try:
        files = tree_files(options.run, options.steps)
        size = write_page(options.run.resolve().name, files, output)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    if size > LARGE_PAGE:
        print(
            f"warning: {output} has {size / 1e6:.0f} MB; a browser will be slow with it. "
            f"Choose from its {len(files)} steps with --steps",
            file=sys.stderr,
        )
    print(output)


if __name__ == "__main__":
    main()
