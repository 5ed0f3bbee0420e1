"""Records of a run directory about the commands that worked on it."""

import pytest

from flowalign.utils.journal import FAILURE, Journal, commands


def test_every_command_is_kept_in_order(tmp_path):
    assert commands(tmp_path) == []
    for command in ("flowalign train a.yaml", "flowalign train a.yaml --resume"):
        with Journal(tmp_path, command):
            pass
    assert commands(tmp_path) == ["flowalign train a.yaml", "flowalign train a.yaml --resume"]
    assert not (tmp_path / FAILURE).exists()


def test_a_failure_is_told_and_goes_on_to_the_caller(tmp_path):
    with pytest.raises(ValueError, match="reward is not finite"), Journal(tmp_path, "flowalign"):
        raise ValueError("reward is not finite\nat step 3")
    assert (tmp_path / FAILURE).read_text() == "reward is not finite\nat step 3\n"


def test_a_failure_without_words_is_told_by_its_kind(tmp_path):
    with pytest.raises(KeyboardInterrupt), Journal(tmp_path, "flowalign"):
        raise KeyboardInterrupt
    assert (tmp_path / FAILURE).read_text() == "KeyboardInterrupt\n"


def test_the_next_start_forgets_the_failure(tmp_path):
    with pytest.raises(OSError, match="disk"), Journal(tmp_path, "flowalign"):
        raise OSError("disk is full")
    with Journal(tmp_path, "flowalign"):
        assert not (tmp_path / FAILURE).exists()


def test_a_folder_that_cannot_be_written_does_not_hide_the_failure(tmp_path):
    def lose_the_folder_and_fail(folder):
        (folder / "commands.txt").unlink()
        folder.rmdir()
        raise ValueError("the reason")

    folder = tmp_path / "gone"
    folder.mkdir()
    with pytest.raises(ValueError, match="the reason"), Journal(folder, "flowalign"):
        lose_the_folder_and_fail(folder)
