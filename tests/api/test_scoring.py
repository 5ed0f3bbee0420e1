"""Images and datasets are scored from Python, and their scores become pairs that train."""

import io

import pytest
import torch
from PIL import Image

import flowalign
from flowalign.types import RewardModel, RewardSpec
from tests.fixtures.scripts import SIZE, assert_no_shell, open_sd3, redness

COLOURS = ["red", "black", "#800000", "#400000"]


def images():
    return [Image.new("RGB", (32, 32), colour) for colour in COLOURS]


def jpg(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_a_published_reward_scores_images_paths_and_tensors(tmp_path):
    model = flowalign.rewards.JpegSize()
    (first, *_) = images()
    first.save(tmp_path / "red.png")
    pixels = torch.zeros(1, 3, 32, 32)
    pixels[:, 0] = 1
    assert model([first]) == model([tmp_path / "red.png"]) == model(pixels)
    with pytest.raises(ValueError, match="prompts has 2 entries for 1"):
        model([first], ["a", "b"])
    with pytest.raises(ValueError, match=r"media\[0\] is int"):
        model([3])


@pytest.mark.slow
def test_images_in_memory_become_a_table_pairs_and_a_trained_pipeline(tmp_path):
    table = flowalign.score(images(), redness, ["a", "a", "b", "b"])
    assert table["redness"] == pytest.approx([1.0, 0.0, 128 / 255, 64 / 255])
    assert type(table.to_pandas()).__name__ == "DataFrame"
    assert table.to_dataset().column_names == list(table)
    pairs = flowalign.make_pairs(table, "best_worst")
    assert [round(pair["gap"], 2) for pair in pairs] == [1.0, 0.25]
    result = flowalign.align(
        open_sd3(tmp_path),
        data=pairs,
        method="flow_dpo",
        num_steps=2,
        batch_size=2,
        micro_batch=2,
        output_dir=str(tmp_path / "run"),
        settings={"threads": 1},
        **SIZE,
    )
    assert result.summary["steps"] == 2


def test_a_job_with_a_folder_is_continued_and_read_by_pandas(tmp_path):
    import datasets
    import pandas as pd

    rows = [{"image": image, "caption": "a"} for image in images()]
    data, calls = datasets.Dataset.from_list(rows), []

    def counting(images, prompts):
        calls.extend(prompts)
        return [0.5] * len(images)

    for _ in range(2):
        table = flowalign.score(data, {"half": counting}, out=tmp_path / "scores")
    assert calls == ["a"] * 4
    assert pd.read_parquet(tmp_path / "scores/scores.parquet")["half"].tolist() == table["half"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pick_a_pic", "trl", "kto"])
def test_preference_data_trains_as_the_ecosystem_names_it(kind, tmp_path):
    import datasets

    (good, bad, *_) = images()
    rows = {
        "pick_a_pic": {"jpg_0": jpg(bad), "jpg_1": jpg(good), "label_0": 0, "caption": "red"},
        "trl": {"prompt": "red", "chosen": good, "rejected": bad},
        "kto": {"prompt": "red", "completion": good, "label": True},
    }
    more = {"label_1": 1, "image_0_uid": "x", "image_1_uid": "y"} if kind == "pick_a_pic" else {}
    labels = [{"completion": bad, "label": False}] if kind == "kto" else [{}]
    data = datasets.Dataset.from_list([rows[kind] | more, rows[kind] | more | labels[0]])
    result = flowalign.align(
        open_sd3(tmp_path),
        data=data,
        method="configs/preference/shapes/kto.yaml" if kind == "kto" else "flow_dpo",
        num_steps=1,
        batch_size=2 if kind == "kto" else 1,
        micro_batch=2,
        output_dir=str(tmp_path / "run"),
        settings={"recipe.data.kind": "samples"} if kind == "kto" else {},
        **SIZE,
    )
    assert result.summary["steps"] == 1


def test_a_missing_column_and_an_empty_table_are_named(tmp_path):
    import datasets

    data = datasets.Dataset.from_list([{"image": images()[0]}])
    with pytest.raises(ValueError, match="no column 'caption'"):
        flowalign.score(data, redness, columns={"prompt": "caption"})
    with pytest.raises(ValueError, match="rewards is empty"):
        flowalign.score(images(), {})


class Asks(RewardModel):
    """Needs prompts, and must not be loaded for data without any."""

    spec = RewardSpec("asks", ("fit",), "any", (0.0, 1.0), "none", needs=("prompt",))

    def load(self):
        raise AssertionError("loaded before its prompts were checked")

    def score(self, batch):
        raise AssertionError("never scored")


WRONG = {
    "unmapped": ({"data": [{"file": "a.png"}]}, r"such as columns=\{'image': 'file'\}"),
    "prompts": ({"data": [{"image": "a.png"}]}, r"or name their column: columns=\{'prompt': "),
    "batch": ({"batch_size": 0}, "^batch_size is 0; it must be at least 1"),
    "limit": ({"limit": 0}, "^limit is 0; it must be at least 1"),
    "share": ({"max_failed_fraction": 3.0}, "^max_failed_fraction is 3.0; it must be at least 0"),
    "file": ({"out": __file__}, "^out .* is a file; it must be a folder"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_of_score_are_named_as_in_python(name):
    changes, message = WRONG[name]
    rewards = {"prompts": Asks()}.get(name, redness)
    given = {"data": images(), "rewards": rewards, "prompts": "a"} | changes
    with pytest.raises(ValueError, match=message) as error:
        flowalign.score(**given)
    assert_no_shell(str(error.value))


def test_other_settings_of_a_folder_and_wrong_pairs_are_named_as_in_python(tmp_path):
    table = flowalign.score(images(), redness, "a", out=tmp_path / "out")
    with pytest.raises(ValueError, match="choose another out, or the earlier") as error:
        flowalign.score(images()[:1], redness, "a", out=tmp_path / "out")
    assert_no_shell(str(error.value))
    wrong = {
        "rule is 'best'; there are best_worst": {"rule": "best"},
        "min_gap is -1; it must be at least 0": {"min_gap": -1.0},
        "max_per_prompt is 0; it must be at least 1": {"max_per_prompt": 0},
        "weights names blue, which is not compared; there are redness": {"weights": {"blue": 1.0}},
        "there are redness": {"dimensions": ["blue"]},
    }
    for message, changes in wrong.items():
        with pytest.raises(ValueError, match=message) as error:
            flowalign.make_pairs(table, **changes)
        assert_no_shell(str(error.value))
    with pytest.raises(ValueError, match="'gone' does not exist"):
        flowalign.make_pairs("gone")
