"""Errors of the system and their texts are printed as they are, without a traceback."""

import argparse
from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch

from flowalign.cli.main import build_parser, complain, main, run_verb
from flowalign.extra.clip_pairs.clip_pairs_job import ClipPairs
from flowalign.reward_training.embeddings import UserEmbeddings
from flowalign.reward_training.reward_run import RewardRun
from flowalign.rewards.config import RewardFile
from flowalign.runs.config import Run
from flowalign.sampling.search import Search
from flowalign.studies.benchmark.card import Card
from flowalign.utils.setting_errors import KINDS
from tests.fixtures.commands import refusal


def exhaust_allocator(_):
    torch.empty(1 << 60)


def exhaust_python(_):
    bytearray(1 << 60)


def exhaust_loader(_):
    raise ImportError("libtorch_cpu.so: failed to map segment from shared object")


@pytest.mark.parametrize("work", [exhaust_allocator, exhaust_python, exhaust_loader])
def test_a_command_without_memory_ends_with_one_message(work, capsys):
    assert run_verb(argparse.Namespace(run=work, verb="score")) == 1
    said = capsys.readouterr().err
    assert said.startswith("flowalign: out of memory on the CPU")
    assert "--batch_size" in said
    assert len(said.splitlines()) <= 5


def test_other_errors_of_a_program_are_not_hidden():
    def work(_):
        raise RuntimeError("a mistake")

    with pytest.raises(RuntimeError, match="a mistake"):
        run_verb(argparse.Namespace(run=work, verb="score"))


@pytest.mark.parametrize("name", ["x\\[/y]", "a:smile:.yaml", "[bold]b[/bold]", "[/]"])
def test_names_are_printed_without_markup_and_emoji(name, capsys):
    complain(f"no file {name}", 2)
    assert capsys.readouterr().err == f"flowalign: no file {name}\n"


# Numbers of the command line: every one has a range, and says it ----------------------------------


CHECKED_BY_THEIR_VERB = {"--min_gap", "--tolerance", "--max_failed_fraction"}
"""Shares and gaps, which other options decide about."""


def options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from options(inner)
        elif action.option_strings:
            yield f"{parser.prog} {action.option_strings[0]}", action


NUMBERS = {
    name: action
    for name, action in options(build_parser())
    if action.type is not None and action.option_strings[0] not in CHECKED_BY_THEIR_VERB
}


def test_the_numbers_of_all_verbs_are_found():
    assert len(NUMBERS) >= 29
    assert {"flowalign bench --repeats", "flowalign reward eval --bins"} <= NUMBERS.keys()


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_a_range_that_no_nonsense_is_in(name):
    for text in ("-1", "x", "", "nan", "inf", "1" * 5000):
        with pytest.raises(argparse.ArgumentTypeError, match=r"is .*; it must be "):
            NUMBERS[name].type(text)


def test_every_default_is_in_the_range_of_its_option():
    for name, action in NUMBERS.items():
        default = action.default
        for value in default if isinstance(default, list) else [default]:
            if isinstance(value, int | float):
                assert action.type(str(value)) == value, name


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("bench a.yaml --repeats 0", "bench: --repeats is 0; it must be at least 1"),
        ("eval a.yaml --processes 1.5", "is '1.5'; it must be a whole number at least 1"),
        ("compare a.yaml --seeds 0 -1", "--seeds is -1; it must be in [0, 9223372036854775807]"),
        ("pairs t --out o --rule gap --stages 1", "pairs: --stages is 1; it must be at least 2"),
        ("clip-pairs a.yaml --shard 2/2", "--shard is 2/2; it must be i/n with 0 <= i < n"),
        ("serve-reward r --port 70000", "--port is 70000; it must be in [0, 65535]"),
        ("serve-reward r --deadline 0", "--deadline is 0; it must be a number at least 0.001"),
    ],
)
def test_a_number_outside_its_range_is_told_with_option_value_and_range(capsys, words, told):
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 2


# A file for another command is refused with that command, and misspelt names find their -----------


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
