"""Options that need or exclude others are refused by the parser, before anything is imported."""

import argparse
import re
from collections.abc import Iterator

import pytest

from flowalign.cli.main import build_parser
from tests.fixtures.commands import refusal

PAIRS = "pairs t --out o --rule"
BROKEN = {
    "check r --gpu h100-80gb": "--gpu needs --gpus N",
    "check r --costs c": "--costs needs --gpus N",
    "check r --reward-seconds 0": "--reward-seconds needs --gpus N",
    "check r --gpus 1": "--gpus needs --gpu TYPE or --costs FILE",
    "check r --gpus 2 --gpu h100-80gb --processes 2": "--gpus excludes --processes",
    "compare a b --data x": "--data needs --benchmark NAME",
    "eval r --limit 1": "--limit needs --benchmark NAME",
    "eval r --seed 0": "--seed needs --benchmark NAME",
    "eval r --distance": "--distance needs --weights CHECKPOINT",
    "eval r --benchmark b --shard 0/2 --processes 2": "--shard excludes --processes",
    "export r --dry-run": "--dry-run needs --push-to-hub OWNER/NAME",
    "export r --push-to-hub ann/x": "--push-to-hub needs --license: the licence of the base",
    f"{PAIRS} gap --stages_by rank": "--stages_by needs --stages",
    f"{PAIRS} gap --labels --stages 2": "--labels excludes --stages",
    f"{PAIRS} per_dimension --labels": "--labels excludes --rule per_dimension",
    f"{PAIRS} per_dimension --weights a=1": "--weights excludes --rule per_dimension",
    f"{PAIRS} gap --tolerance 0": "--tolerance needs --rule dominance",
    f"{PAIRS} gap --held_out 1": "--held_out is 1; it must be a number in [0, 1)",
    "probe r --credit 2 --metric update": "--credit excludes --metric",
    "probe r --credit 2 --out o": "--credit excludes --out",
    "reward train r --resume --overwrite": "--resume excludes --overwrite",
    "reward eval t --limit 3": "--limit needs --rewards",
    "reward eval t --columns a=b": "--columns needs --rewards",
    "reward eval t --rewards x.yaml": "--rewards needs --out",
    "sample r --prompt p --noises 4": "--noises needs --reward_sds STEPS",
    "sample r --prompt p --best_of 4 --reward_sds 3": "--reward_sds excludes --best_of",
    "score d --rewards r --out o --summarize x --shard 0/2": "--summarize excludes --shard",
    "score d --rewards r --out o --executor ray --shard 0/2": "--shard excludes --executor ray",
    "score d --rewards r --out o --address auto": "--address needs --executor ray",
    "train r --resume --overwrite": "--resume excludes --overwrite",
    "train r --restarts 1 --overwrite": "--restarts excludes --overwrite",
    "train r --nodes 2": "--nodes needs --rendezvous HOST:PORT",
    "train r --rendezvous h:1": "--rendezvous needs --nodes N",
    "train r --nodes 2 --rendezvous h:1 --executor ray": "--nodes excludes --executor ray",
}
"""Commands, and the rule that each breaks."""


@pytest.mark.parametrize(("command", "rule"), BROKEN.items(), ids=BROKEN)
def test_options_that_do_not_belong_together_are_refused(capsys, command, rule):
    assert rule in refusal(capsys, *command.split())


def list_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser of a command, and those of its actions."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from list_parsers(inner)


def test_rules_name_options_that_exist():
    rules = {one: parser for parser in list_parsers(build_parser()) for one in parser.rules}
    assert len(rules) > 30
    for rule, parser in rules.items():
        known = {option for action in parser._actions for option in action.option_strings}
        assert {*re.findall(r"--[\w-]+", rule)} <= known, rule
