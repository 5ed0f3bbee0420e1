"""`check` reads the first rows of stored data, and refuses data that training could not use."""

import json

import pytest

from flowalign.data.preference.dataset import PreferenceDataset
from flowalign.types import InputSpec
from tests.fixtures.matrix import write_workspace

PLAIN = InputSpec()
EDITS = InputSpec(references=(1, 1), kind="source")


@pytest.fixture
def data(tmp_path):
    write_workspace(tmp_path)
    return tmp_path / "data"


@pytest.mark.slow
def test_rows_with_the_columns_of_a_kind_pass(data):
    PreferenceDataset(path=str(data / "attributes.jsonl"), kind="attributes").check_rows(PLAIN)
    PreferenceDataset(path=str(data / "captions.jsonl"), kind="samples").check_rows(PLAIN)
    pairs = PreferenceDataset(path=str(data / "pickapic_v2/train"), schema="pick_a_pic")
    pairs.check_rows(PLAIN)


@pytest.mark.slow
def test_rows_without_the_columns_of_a_kind_are_refused(data):
    dataset = PreferenceDataset(path=str(data / "captions.jsonl"), kind="attributes")
    with pytest.raises(ValueError, match="missing texts positive and negative") as error:
        dataset.check_rows(PLAIN)
    assert len(str(error.value).splitlines()) <= 5


@pytest.mark.slow
def test_rows_without_required_references_are_refused(data):
    dataset = PreferenceDataset(path=str(data / "captions.jsonl"), kind="samples")
    with pytest.raises(ValueError, match="unfit request"):
        dataset.check_rows(EDITS)


@pytest.mark.slow
def test_clips_that_are_too_short_are_refused(data):
    clips = PreferenceDataset(path=str(data / "clips/captions.jsonl"), kind="samples")
    clips.check_rows(PLAIN, num_frames=300)
    with pytest.raises(ValueError, match=r"0\.mp4: 300 of 301 frames"):
        clips.check_rows(PLAIN, num_frames=301)
    images = PreferenceDataset(path=str(data / "captions.jsonl"), kind="samples")
    with pytest.raises(ValueError, match=r"0\.png: 1 of 5 frames"):
        images.check_rows(PLAIN, num_frames=5)


@pytest.mark.slow
def test_one_usable_row_among_the_first_is_enough(data):
    file = data / "captions.jsonl"
    lines = file.read_text().splitlines()
    absent = json.dumps({"prompt": "x", "image": "absent.png"})
    file.write_text("\n".join([*[absent] * 20, lines[0]]))
    PreferenceDataset(path=str(file), kind="samples").check_rows(PLAIN)
    file.write_text("\n".join([absent] * 3))
    with pytest.raises(ValueError, match="none of the first 50 rows"):
        PreferenceDataset(path=str(file), kind="samples").check_rows(PLAIN)
