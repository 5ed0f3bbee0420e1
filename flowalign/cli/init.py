"""Write a run file by a few questions or flags: `flowalign init`."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from flowalign.utils.errors import ConfigError

if TYPE_CHECKING:
    from flowalign.runs.draft import Model

HELP = "Write a run file for a model, prompts and a reward."
T = TypeVar("T")
_ASKED = ("model", "prompts", "reward")
"""Options that are asked for where they are missing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flowalign init`."""
    add = parser.add_argument
    add("--model", help="name of a file in configs/models, a folder of a pipeline, or a hub id")
    add("--family", help="file in configs/models whose settings suit the folder or the hub id")
    add("--prompts", metavar="FILE", help="one prompt a line, or JSONL; own: the model's")
    add("--reward", help="dotted path of a class, YAML file, name in configs/rewards, or own")
    add(
        "--method",
        default="flow_grpo",
        help="name of a file in configs/methods; default: flow_grpo",
    )
    add("--out", default="run.yaml", metavar="FILE", help="new file; default: run.yaml")


def run(args: argparse.Namespace) -> int:
    """Write the run file and print the next command; returns 0.

    Raises:
        ConfigError: An answer is missing or cannot be used, or the file exists.
    """
    from flowalign.runs import draft

    out, own = Path(args.out), draft.OWN
    try:
        draft.check_absent(out)
        _check_complete(args)
        method = draft.find_method(args.method)
        model = _model(args)
        prompts = _answer(args.prompts, "Prompts, a file or own", own, draft.find_prompts)
        question = "Reward, a dotted path, a YAML file or own"
        reward = _answer(args.reward, question, own, draft.find_reward)
        content = draft.draft(model, method, prompts, reward)
        draft.write(out, content, f"{model.path or model.family} by {method}, from flowalign init")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _say(f"{out} is written; the next command is:\nflowalign check {out}")
    return 0


def _check_complete(args: argparse.Namespace) -> None:
    missing = [f"--{name}" for name in _ASKED if vars(args)[name] is None]
    if missing and not sys.stdin.isatty():
        raise ValueError(f"there is nobody to ask: give {', '.join(missing)}")


def _model(args: argparse.Namespace) -> "Model":
    """Return the model; its family is asked for where several suit and somebody can answer."""
    from flowalign.runs.draft import families, find_model, models

    def suiting(name: str) -> tuple[str, list[str]]:
        return name, families(name)

    question = f"Model, a folder, a hub id or one of {', '.join(models())}"
    name, known = _answer(args.model, question, "shapes", suiting)
    if len(known) == 1 or args.family or not sys.stdin.isatty():
        return find_model(name, args.family)
    question = f"Family of {name}, one of {', '.join(known)}"
    return _answer(None, question, known[0], lambda family: find_model(name, family))


def _answer(given: str | None, question: str, default: str, check: Callable[[str], T]) -> T:
    """Return what `check` makes of an option, or of the first answer that it takes."""
    if given is not None:
        return check(given)
    while True:
        sys.stderr.write(f"{question} [{default}]: ")
        sys.stderr.flush()
        if not (line := sys.stdin.readline()):
            raise ValueError(f"no answer to: {question}")
        try:
            return check(line.strip() or default)
        except ValueError as error:
            _say(str(error))


def _say(text: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(text)
