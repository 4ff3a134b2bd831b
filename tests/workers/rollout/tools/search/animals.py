"""A corpus of three documents, of every form."""

import json

ANIMALS = [
    {"id": 1, "title": "Otter", "text": "The otter swims in rivers and eats fish."},
    {"id": 2, "title": "Heron", "text": "The heron waits in shallow water and eats fish."},
    {"id": "x3", "contents": '"Mole"\nThe mole digs.\nIt has small eyes.'},
]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
