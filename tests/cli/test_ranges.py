"""Numbers of the command line: every one has a range, and says it."""

import argparse
from collections.abc import Iterator

import pytest

from flowalign.cli.main import build_parser, main

CHECKED_BY_THEIR_VERB = {"--min_gap", "--tolerance", "--held_out", "--max_failed_fraction"}
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
        ("bench a.yaml --repeats -2", "bench: --repeats is -2; it must be at least 1"),
        ("demo --steps 0", "demo: --steps is 0; it must be at least 1"),
        ("demo --processes 0", "demo: --processes is 0; it must be at least 1"),
        ("check a.yaml --processes 0", "check: --processes is 0; it must be at least 1"),
        ("train a.yaml --processes -1", "train: --processes is -1; it must be at least 1"),
        ("eval a.yaml --processes 1.5", "is '1.5'; it must be a whole number at least 1"),
        ("compare a.yaml --seeds 0 -1", "--seeds is -1; it must be in [0, 9223372036854775807]"),
        ("compare a.yaml --jobs 0", "compare: --jobs is 0; it must be in [1, "),
        ("sample a.yaml --prompt x --count 0", "sample: --count is 0; it must be at least 1"),
        ("pairs t --out o --rule gap --stages 1", "pairs: --stages is 1; it must be at least 2"),
        ("clip-pairs a.yaml --shard 2/2", "--shard is 2/2; it must be i/n with 0 <= i < n"),
        ("reward eval t --bins 0", "reward eval: --bins is 0; it must be at least 1"),
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
