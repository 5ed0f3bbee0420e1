"""Settings that a resumed run may change, and descriptions of differences."""

import pytest

from flowalign.runs.run_directory import check_resumable, find_changes, shorten_list

BEFORE = {
    "policy": {
        "class_path": "pipelines.SD3",
        "init_args": {"path": "sd3", "lora": {"rank": 4, "alpha": 8}, "new": None},
    },
    "recipe": {
        "class_path": "flowalign.training.PolicyGradient",
        "init_args": {"prompts": "a.txt", "micro_batch": 8, "sampling": {"micro_batch": 8}},
    },
    "rewards": [{"class_path": "reward_models.JpegSize"}],
    "ema": {"decay": 0.9, "every": 1},
    "num_steps": 10,
    "seed": 1,
}


def policy(**arguments) -> dict:
    inside = BEFORE["policy"]["init_args"] | arguments
    return BEFORE | {"policy": BEFORE["policy"] | {"init_args": inside}}


def recipe(**arguments) -> dict:
    inside = BEFORE["recipe"]["init_args"] | arguments
    return BEFORE | {"recipe": BEFORE["recipe"] | {"init_args": inside}}


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (BEFORE, []),
        (BEFORE | {"num_steps": 20}, ["num_steps: 10 -> 20"]),
        (BEFORE | {"ema": {"decay": 0.5, "every": 1}}, ["ema.decay: 0.9 -> 0.5"]),
        (recipe(micro_batch=2), ["recipe.micro_batch: 8 -> 2"]),
        (recipe(sampling={"micro_batch": 4}), ["recipe.sampling.micro_batch: 8 -> 4"]),
        (policy(newer=3), ["policy.newer: unknown -> 3"]),
    ],
)
def test_what_leaves_the_steps_so_far_as_they_are_may_change(after, told):
    assert [str(change) for change in check_resumable(BEFORE, after, "here")] == told


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (policy(lora={"rank": 8, "alpha": 8}), "policy.lora.rank: 4 -> 8"),
        (policy(lora=None), "policy.lora: {'rank': 4, 'alpha': 8} -> null"),
        (policy(path="sdxl"), "policy.path: sd3 -> sdxl"),
        (BEFORE | {"seed": 2}, "seed: 1 -> 2"),
        (BEFORE | {"ema": None}, "ema: {'decay': 0.9, 'every': 1} -> null"),
        (recipe(prompts="b.txt"), "recipe.prompts: a.txt -> b.txt"),
        (
            BEFORE | {"recipe": {"class_path": "flowalign.training.Matching", "init_args": {}}},
            "recipe: flowalign.training.PolicyGradient -> flowalign.training.Matching",
        ),
    ],
)
def test_what_they_came_from_may_not(after, told):
    with pytest.raises(ValueError, match="here cannot resume with other settings") as caught:
        check_resumable(BEFORE, after | {"num_steps": 20}, "here")
    _, *lines, last = str(caught.value).splitlines()
    assert lines == [told]
    assert "may change num_steps, optimizer" in last


def test_many_differences_are_counted_within_five_lines():
    after = policy(path="b", lora=None) | {"seed": 2, "ema": None}
    with pytest.raises(ValueError, match="cannot resume") as caught:
        check_resumable(BEFORE, after, "here")
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert lines[3] == "and 2 more"
    assert shorten_list(["a", "b", "c"]) == ["a", "b", "c"]


def test_long_values_are_cut():
    (change,) = find_changes({"a": "x" * 500}, {"a": 1})
    assert str(change) == f"a: {'x' * 57}... -> 1"
