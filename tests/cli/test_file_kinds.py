"""A file for another command is refused with that command, and misspelt names find their like."""

from dataclasses import fields

import pytest

from flowalign.extra.clip_pairs.run_file import ClipPairs
from flowalign.reward_training.embeddings import UserEmbeddings
from flowalign.reward_training.reward_run import RewardRun
from flowalign.rewards.config import RewardFile
from flowalign.runs.config import Run
from flowalign.sampling.search import Search
from flowalign.studies.benchmark.card import Card
from flowalign.utils.setting_errors import KINDS
from tests.fixtures.commands import refusal

RUN, USERS = "configs/shapes.yaml", "configs/reward/pickapic_users.yaml"
REWARD, CLIPS = "configs/reward/shapes_preference.yaml", "configs/clip_pairs/shapes_video.yaml"
SEARCH, REWARDS = "configs/search/shapes.yaml", "configs/rewards/shapes.yaml"


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("check", REWARD), f"flowalign reward train {REWARD}"),
        (("check", CLIPS), f"flowalign clip-pairs {CLIPS}"),
        (("train", USERS), f"flowalign users {USERS}"),
        (("check", SEARCH), f"flowalign sample RUN_FILE --prompt TEXT --search {SEARCH}"),
        (("check", REWARDS), f"flowalign score DATA --rewards {REWARDS} --out FOLDER"),
        (("reward", "train", RUN), f"flowalign train {RUN}"),
        (("clip-pairs", RUN), f"flowalign train {RUN}"),
        (("users", REWARD), f"flowalign reward train {REWARD}"),
        (("serve-reward", RUN), f"flowalign train {RUN}"),
        (("sample", RUN, "--prompt", "x", "--search", RUN), f"flowalign train {RUN}"),
        (
            ("check", "configs/methods/dense_grpo.yaml"),
            "flowalign check configs/models/sd35_medium.yaml configs/methods/dense_grpo.yaml",
        ),
    ],
)
def test_a_file_of_the_wrong_kind_is_told_with_the_matching_command(capsys, words, command):
    assert command in refusal(capsys, *words)


def test_the_marks_of_each_kind_are_settings_of_it_and_of_none_before(capsys):
    kinds = [Run, RewardRun, UserEmbeddings, ClipPairs, Search, Card, RewardFile]
    assert [kind.__name__ for kind in kinds] == list(KINDS)
    for i, kind in enumerate(kinds):
        own = {field.name for field in fields(kind)}
        assert KINDS[kind.__name__][0] <= own
        assert not any(KINDS[before.__name__][0] <= own for before in kinds[:i])


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--learning_rat", "did you mean optimizer.learning_rate?"),
        ("--optimizer.learning_rat", "did you mean optimizer.learning_rate?"),
        ("--num_step", "did you mean num_steps?"),
    ],
)
def test_a_misspelt_setting_is_suggested_wherever_it_stands(capsys, option, meant):
    assert meant in refusal(capsys, "check", RUN, option, "3")
