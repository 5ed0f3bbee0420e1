"""Write a run file from a few answers or options."""

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from flowalign.runs.library import draft_run_file
from flowalign.utils.console import say
from flowalign.utils.errors import convert_value_errors

T = TypeVar("T")
_ASKED = ("model", "prompts", "reward")
"""Options that the command asks for if they are missing."""


@convert_value_errors()
def run(args: argparse.Namespace) -> int:
    """Write the run file, print the next command, and return 0."""
    out, own = Path(args.out), draft_run_file.OWN
    draft_run_file.check_absent(out)
    _check_complete(args)
    method = draft_run_file.find_method(args.method)
    model = _find_model(args)
    prompts = _answer(args.prompts, "Prompts, a file or own", own, draft_run_file.find_prompts)
    question = "Reward, a dotted path, a YAML file or own"
    reward = _answer(args.reward, question, own, draft_run_file.find_reward)
    content = draft_run_file.draft(model, method, prompts, reward)
    draft_run_file.write(
        out, content, f"{model.path or model.family} by {method}, from flowalign init"
    )
    command = shlex.join(["flowalign", "check", str(out)])
    say(f"{out} is written; the next command is:\n{command}")
    return 0


def _check_complete(args: argparse.Namespace) -> None:
    missing = [f"--{name}" for name in _ASKED if vars(args)[name] is None]
    if missing and not sys.stdin.isatty():
        raise ValueError(f"without a terminal, {', '.join(missing)} must be given")


def _find_model(args: argparse.Namespace) -> draft_run_file.Model:
    """Return the model; ask for its family if several suit and a terminal is attached."""
    question = f"Model, a folder, a hub id or one of {', '.join(draft_run_file.models())}"
    name, known = _answer(
        args.model, question, "toy_shapes", lambda name: (name, draft_run_file.families(name))
    )
    if len(known) == 1 or args.family or not sys.stdin.isatty():
        return draft_run_file.find_model(name, args.family)
    question = f"Family of {name}, one of {', '.join(known)}"
    return _answer(None, question, known[0], lambda family: draft_run_file.find_model(name, family))


def _answer(option: str | None, question: str, default: str, check: Callable[[str], T]) -> T:
    """Return the result of `check` for an option, or for the first answer that it accepts."""
    if option is not None:
        return check(option)
    while True:
        sys.stderr.write(f"{question} [{default}]: ")
        sys.stderr.flush()
        if not (line := sys.stdin.readline()):
            raise ValueError(f"no answer to: {question}")
        try:
            return check(line.strip() or default)
        except ValueError as error:
            say(str(error))
