"""Public question sets: questions that are left out, and encrypted files."""

import base64

import pytest

from recipe.tasks.deep_research import reward as deep_research
from tests.evaluation.questions.layouts import LAYOUTS, gaia_row, read
from verl.evaluation.questions.prompts import tool_instruction
from verl.utils.reward_score.tool_format import check_format


def test_questions_that_need_more_than_text_are_counted(tmp_path):
    rows = [gaia_row(0), gaia_row(1, file_name="x.pdf"), gaia_row(2)]
    result = read(tmp_path, "gaia", rows)
    assert [question.id for question in result.questions] == ["t0", "t2"]
    for unknown in ({"Final answer": "?"}, {"Final answer": " ?"}, {"Final answer": "", "answer": "?"}):
        with pytest.raises(ValueError, match="no questions to ask.*no public answer: use the validation split': 1"):
            read(tmp_path, "gaia", [gaia_row(0, **unknown)])
    assert result.left_out == {"comes with a file": 1}
    hle = LAYOUTS["hle"][0]
    result = read(tmp_path, "hle", [hle, hle | {"id": "68", "image": "data:image/png;base64,AA"}])
    assert result.left_out == {"needs an image": 1} and len(result.questions) == 1
    olympiad = LAYOUTS["olympiadbench"][0]
    rows = [olympiad, olympiad | {"id": 1, "image_1": "bytes"}, olympiad | {"id": 2, "modality": "Multimodal"}]
    assert read(tmp_path, "olympiadbench", rows).left_out == {"needs an image": 2}
    musique = LAYOUTS["musique"][0]
    result = read(tmp_path, "musique", [musique, musique | {"id": "x", "answerable": False}])
    assert result.left_out == {"has no answer": 1}


def test_lists_of_golden_answers(tmp_path):
    rows = [{"id": "test_0", "question": "q?", "golden_answers": ["Ann", "Anna"]}]
    for name in ("hotpotqa", "2wikimultihopqa", "musique", "bamboogle"):
        (question,) = read(tmp_path, name, rows, ".parquet").questions
        assert (question.id, question.answers) == ("test_0", ["Ann", "Anna"])


def encrypt(text: str, key: str) -> str:
    """Each byte of the text XOR the key's byte at the same place, the key repeated; base64 of it."""
    data, key_bytes = text.encode(), key.encode()
    repeated = (key_bytes * (len(data) // len(key_bytes) + 1))[: len(data)]
    secret = (int.from_bytes(data, "big") ^ int.from_bytes(repeated, "big")).to_bytes(len(data), "big")
    return base64.b64encode(secret).decode()


def test_xbench_as_published_and_decrypted(tmp_path):
    canary = "3b8e-never-appear"
    rows = [
        {"id": str(i), "prompt": encrypt(text, canary), "answer": encrypt("四十二", canary), "canary": canary}
        for i, text in enumerate(["谁养水獭？\n第二行", "second, with a comma?"])
    ]
    result = read(tmp_path, "xbench", rows, ".csv").questions
    assert [(question.text, question.answers) for question in result] == [
        ("谁养水獭？\n第二行", ["四十二"]),
        ("second, with a comma?", ["四十二"]),
    ]
    plain = [{"id": "0", "prompt": "谁养水獭？", "answer": "四十二"}]
    assert read(tmp_path, "xbench", plain).questions[0].text == "谁养水獭？"
    for wrong in (plain[0] | {"canary": canary}, rows[0] | {"canary": "another"}):
        with pytest.raises(ValueError, match="encrypted by canary.*leave the canary out: 1 row"):
            read(tmp_path, "xbench", [wrong])


def test_a_response_that_obeys_the_instruction_is_well_formed():
    """The instruction's own example, behind the think that it asks for, is what the rewards want."""
    example = tool_instruction().rpartition("as in ")[2].rstrip(".")
    response = f"<think>Easy.</think>{example}"
    assert check_format(response).problem is None
    assert deep_research.compute_score("bamboogle", response, "Paris")["acc"] == 1.0
