"""A file or folder is seen complete or not at all, and nothing unfinished stays beside it."""

import os
from pathlib import Path

import pytest

from verl.utils.atomic_files import new_folder, replacing


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    for text in ("old", "new"):
        before = path.read_text() if path.exists() else None
        with replacing(path) as unfinished:
            unfinished.write_text(text)
            assert (path.read_text() if path.exists() else None) == before
        assert path.read_text() == text
    assert names(path.parent) == ["file.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failed_block_leaves_the_old_file_alone(tmp_path, error):
    (tmp_path / "file.txt").write_text("old")
    with pytest.raises(error), replacing(tmp_path / "file.txt") as unfinished:
        unfinished.write_text("half")
        raise error
    with pytest.raises(error), new_folder(tmp_path / "folder") as unfinished:
        (unfinished / "part").write_text("half")
        raise error
    assert names(tmp_path) == ["file.txt"] and (tmp_path / "file.txt").read_text() == "old"


def test_a_folder_appears_with_all_its_files(tmp_path):
    with new_folder(tmp_path / "deep" / "folder") as unfinished:
        (unfinished / "a").write_text("1")
        assert not (tmp_path / "deep" / "folder").exists()
    assert names(tmp_path / "deep") == ["folder"] and (tmp_path / "deep/folder/a").read_text() == "1"


def test_the_slower_of_two_writers_does_not_replace_the_others_folder(tmp_path):
    with pytest.raises(OSError), new_folder(tmp_path / "folder") as slower:
        (slower / "mine").write_text("")
        with new_folder(tmp_path / "folder") as faster:
            (faster / "theirs").write_text("")
    assert names(tmp_path) == ["folder"] and names(tmp_path / "folder") == ["theirs"]


def test_a_new_folder_has_the_mode_of_any_other(tmp_path):
    (tmp_path / "usual").mkdir()
    with new_folder(tmp_path / "folder"):
        pass
    assert os.stat(tmp_path / "folder").st_mode == os.stat(tmp_path / "usual").st_mode
