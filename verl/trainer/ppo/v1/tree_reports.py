"""Reports on a batch's prompt groups and their trees: metrics, and a file of trees for the viewer."""

import json
import random
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from rapidfuzz.distance import Levenshtein

from verl.trainer.ppo.credit.nodes import Nodes
from verl.trainer.ppo.v1.batch_rows import BatchRows, Group
from verl.utils.atomic_files import replacing
from verl.utils.piece_texts import piece_texts
from verl.workers.rollout.trajectory_tree import TOOL_FAULTS, TREE, TREE_METRICS, TrajectoryTree, tree_of_rows

MAX_PAIRS = 28  # all pairs of 8 responses; the diversity of more is measured on a sample


def tree_metrics(rows: BatchRows) -> dict[str, float]:
    """Return the mean of each tree metric over the prompts whose trees have it, as `tree/<name>`; a metric of the
    environment keeps its name, `environment/<name>`. A prompt without a tree counts its responses' tokens as
    `tokens_generated`; `tree/prompts` counts prompts whose groups have not failed."""
    values = defaultdict(list)
    for group in rows.groups:
        plain = {"tokens_generated": sum(rows.tags[row].get("response_len", 0) for row in group.rows)}
        extras = rows.column("extra_fields", group.rows)
        for name, value in next((e[TREE_METRICS] for e in extras if e.get(TREE_METRICS)), plain).items():
            values[name if name.startswith("environment/") else f"tree/{name}"].append(value)
    return {name: float(np.mean(numbers)) for name, numbers in values.items()} | {"tree/prompts": len(rows.groups)}


def broken_tools(rows: BatchRows) -> dict[str, str]:
    """Return the tools whose well-formed calls all failed by the tool's own fault, with the message of one call."""
    faults: dict[str, float] = defaultdict(float)
    answers: dict[str, float] = defaultdict(float)
    said: dict[str, str] = {}
    for group in rows.groups:
        for extra in rows.column("extra_fields", group.rows):
            for name, value in (extra.get(TREE_METRICS) or {}).items():
                tool, _, what = name.removeprefix("tool_").rpartition("/")
                if tool and name.startswith("tool_") and what in ("calls", "own_faults", "malformed"):
                    answers[tool] += value if what == "calls" else -value
                    faults[tool] += value if what == "own_faults" else 0
            said |= extra.get(TOOL_FAULTS) or {}
    return {tool: said.get(tool, "") for tool, number in faults.items() if number and not answers[tool]}


def compared_pairs(responses: Sequence[Sequence[int]]) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Return all pairs of responses, or `MAX_PAIRS` of them if there are more, drawn at random with a seed from the
    responses."""
    pairs = list(combinations(responses, 2))
    return pairs if len(pairs) <= MAX_PAIRS else random.Random(sum(map(len, responses))).sample(pairs, MAX_PAIRS)


def group_diversity(responses: Sequence[Sequence[int]], answers: Sequence[Hashable] | None = None) -> dict[str, float]:
    """Return the diversity of n responses to one prompt.

    `edit_distance`: mean over `compared_pairs` of Levenshtein distance / length of the longer one; of a single response
        0.
    `distinct_responses`, `distinct_answers`: number of different ones / n. Without `answers`, those read off the
        responses, the second is left out; all missing ones (None) count as one.
    """
    pairs = compared_pairs(responses)
    n = len(responses)
    metrics = {
        "edit_distance": sum(Levenshtein.normalized_distance(a, b) for a, b in pairs) / len(pairs) if pairs else 0.0,
        "distinct_responses": len({tuple(response) for response in responses}) / n,
    }
    if answers is not None:
        metrics["distinct_answers"] = len(set(answers)) / n
    return metrics


def diversity_metrics(rows: BatchRows, groups: Sequence[Group]) -> dict[str, float]:
    """Return the means of `group_diversity` over these groups' answers."""
    values = defaultdict(list)
    for group in groups:
        responses = [row.tolist() for row in rows.column("responses", rows.answers(group))]
        extras = rows.column("extra_fields", rows.answers(group))
        answers = [(extra.get("reward_extra_info") or {}).get("pred") for extra in extras]
        parsed = None if all(answer is None for answer in answers) else answers
        for name, value in group_diversity(responses, parsed).items():
            values[f"diversity/{name}"].append(value)
    return {name: float(np.mean(numbers)) for name, numbers in values.items()}


def tree_of_group(rows: BatchRows, group: Group) -> tuple[TrajectoryTree, bool]:
    """Return a group's tree, and whether the rollout made it; if not, it is that of the responses' common prefixes."""
    extras = rows.column("extra_fields", group.rows)
    if text := next((extra[TREE] for extra in extras if extra.get(TREE)), None):
        return TrajectoryTree.from_json(text), True
    log_probs = rows.column("rollout_log_probs", group.rows)
    responses = [row.tolist() for row in rows.column("responses", group.rows)]
    prompt_ids = rows.column("prompts", group.rows[:1])[0].tolist()
    return tree_of_rows(prompt_ids, responses, log_probs and [row.tolist() for row in log_probs]), False


def segment_advantages(rows: BatchRows, nodes: Nodes) -> torch.Tensor:
    """Return the advantage of each node's first token (N,), summed over the rows through the node."""
    advantages = rows.tokens("advantages", 0.0)
    columns = nodes.first_token % advantages.shape[1]
    passing = advantages[nodes.pass_row, columns[nodes.pass_node]]
    return passing.new_zeros(len(nodes)).index_add_(0, nodes.pass_node, passing)


def tree_record(tree: TrajectoryTree, step: int, uid: str, rewards: list[float | None], update: str, tokenizer) -> dict:
    """Return a line of the trees file. `vocabulary` holds each token's text where it first occurs; where it has another
    one, such as a part of an emoji, its segment's `texts` hold [position, text]. A row without an answer has the reward
    None; `update` is `tree` if shared tokens are computed once, else `rows`."""
    records, vocabulary = tree.to_dict()["segments"], {}
    parents = {segment.parent for segment in tree.segments}
    for end in set(range(len(records))) - parents:
        path = tree.path(end)
        tokens = [token for i in path for token in tree.segments[i].token_ids]
        # A blank before the first word is text: the response goes on from the prompt.
        texts = iter(piece_texts(tokenizer.decode, [tree.prompt_ids, *([token] for token in tokens)])[1:])
        for i in path:
            own = [(token, next(texts)) for token in tree.segments[i].token_ids]
            others = [[at, text] for at, (token, text) in enumerate(own) if vocabulary.setdefault(token, text) != text]
            records[i] |= {"texts": others} if others else {}
    return {
        "step": step,
        "uid": uid,
        "prompt": tokenizer.decode(tree.prompt_ids),
        "rewards": rewards,
        "segments": records,
        "leaves": tree.leaves,
        "metrics": tree.metrics,
        "update": update,
        "vocabulary": {str(token): vocabulary[token] for token in sorted(vocabulary)},
    }


def write_records(run_dir: str | Path, step: int, records: Sequence[dict], after: bool) -> None:
    """Write the records of a step as JSON lines, all or nothing, to a file in the run's folder, such as
    `trees/step_000010.jsonl`. With `after` they follow the file's old records; otherwise they replace them."""
    path = Path(run_dir) / "trees" / f"step_{step:06d}.jsonl"
    before = path.read_text() if after and path.exists() else ""
    with replacing(path) as unfinished, unfinished.open("w") as out:
        out.write(before)
        out.writelines(json.dumps(record) + "\n" for record in records)
