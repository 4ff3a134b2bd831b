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

from verl.utils.atomic_files import replacing

TEMPLATE = Path(__file__).with_name("view_trees.html")
STEP_FILE = re.compile(r"step_(\d+)\.jsonl")


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
    """Return the tree in the page's form. `costs` are thousandths of -log p as whole numbers, which are short;
    None where the policy drew no token. `texts` are pairs (place, text) of tokens that differ from the vocabulary's."""
    return {
        "prompt": tree["prompt"],
        "rewards": tree["rewards"],
        "metrics": tree.get("metrics", {}),
        "update": tree.get("update", ""),
        "leaves": tree["leaves"],
        "vocabulary": tree.get("vocabulary", {}),
        "segments": [_compact_segment(segment) for segment in tree["segments"]],
    }


def _compact_segment(segment: dict) -> dict:
    author, log_probs = segment.get("author", "model"), segment.get("log_probs")
    if author == "tool" or log_probs is None:
        log_probs = [None] * len(segment["token_ids"])
    return {
        "parent": segment.get("parent"),
        "tokens": segment["token_ids"],
        "costs": [None if log_prob is None else round(-1000 * log_prob) for log_prob in log_probs],
        "texts": segment.get("texts", []),
        "author": author,
        "info": segment.get("info") or {},
    }


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


def write_page(title: str, files: dict[int, Path], output: Path) -> None:
    """Write the page tree by tree, so that memory holds a single tree."""
    template = TEMPLATE.read_text(encoding="utf-8")
    before, after = template.replace("{{policy}}", content_policy(template)).split("{{data}}")
    steps = []
    with replacing(output) as unfinished, unfinished.open("w", encoding="utf-8", newline="\n") as page:
        page.write(before)
        for step, path in files.items():
            prompts = []
            for tree in read_trees(path):
                page.write(data_element(f"tree-{step}-{len(prompts)}", tree))
                prompts.append({"prompt": tree["prompt"][:80], "rewards": tree["rewards"]})
            if prompts:
                steps.append({"step": step, "prompts": prompts})
        if not steps:
            raise ValueError(f"{', '.join(map(str, files.values()))}: no trees, the files are empty")
        page.write(data_element("index", {"title": title, "steps": steps}))
        page.write(after)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder")
    parser.add_argument("--output", type=Path, help="page to write; default: trees.html in the run folder")
    parser.add_argument("--steps", type=int, nargs="+", help="only these training steps; default: all")
    options = parser.parse_args(arguments)
    output = options.output or options.run / "trees.html"
    try:
        files = tree_files(options.run, options.steps)
        write_page(options.run.resolve().name, files, output)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(output)


if __name__ == "__main__":
    main()
