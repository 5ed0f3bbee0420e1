"""Every code block of the documentation runs, or is marked and at least understood."""

import re
import tomllib
from contextlib import contextmanager

import pytest
import yaml

from flowalign.cli.main import parse
from flowalign.cli.options import read_settings
from flowalign.extra.clip_pairs.clip_pairs_job import ClipPairs
from flowalign.reward_training.reward_run import load_run
from flowalign.rewards.config import load_rewards
from flowalign.runs.config import load
from flowalign.utils.errors import ConfigError
from flowalign.utils.typed_settings import load_typed
from tests.fixtures.doc_pages import (
    NEEDS,
    PAGES,
    ROOT,
    Command,
    all_blocks,
    blocks,
    commands,
    exported_from,
    name_of,
)
from tests.fixtures.doc_runs import Desk

BASH, PYTHON, YAML = ([*all_blocks(language)] for language in ("bash", "python", "yaml"))
MARKED = [command for block in BASH if block.needs for command in commands(block)]
COMMANDS = [command for block in BASH for command in commands(block)]
_BEFORE_INSTALLING = (["source", ".venv/bin/activate"],)
LANGUAGES = {"bash", "python", "yaml", "text", "bibtex"}


@pytest.fixture
def desk(tmp_path, monkeypatch):
    desk = Desk(tmp_path, monkeypatch)
    yield desk
    desk.close()


def test_every_block_has_a_language_and_a_known_marker():
    for page in PAGES:
        for block in blocks(page):
            assert block.language in LANGUAGES, block.where
            assert block.needs is None or block.needs in NEEDS, block.where


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_every_command_is_parse(command):
    check = {"flowalign": _flowalign, "torchrun": _torchrun}.get(command.words[0], _other)
    check(command)


def _flowalign(command: Command) -> None:
    words = command.words[1:]
    if words != ["--help"]:
        assert all((ROOT / file).is_file() for file in _run_files(parse(words)))


def _torchrun(command: Command) -> None:
    at = command.words.index("flowalign")
    assert command.words[at - 1] == "-m"
    assert all((ROOT / file).is_file() for file in _run_files(parse(command.words[at + 1 :])))


def _run_files(args) -> list[str]:
    """The run files of the repository that a command names; a page's own are written elsewhere."""
    named = [*vars(args).get("config", ()), *vars(args).get("base", ())]
    named = [args.config] if isinstance(vars(args).get("config"), str) else named
    named += [file for one in vars(args).get("configs", ()) for file in one.split("+")]
    return [file for file in named if file.startswith("configs/")]


def _other(command: Command) -> None:
    program, *words = command.words
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "python":
        assert (ROOT / words[0]).is_file()
    elif program == "pip":
        extras = re.findall(r"\[([\w,-]+)\]", " ".join(words))
        assert {e for some in extras for e in some.split(",")} <= {
            *project["optional-dependencies"]
        }
    else:
        assert command.words in _BEFORE_INSTALLING, command


@pytest.mark.parametrize("block", YAML, ids=lambda block: block.where)
def test_every_run_file_that_is_shown_names_classes_that_exist(block):
    for path in re.findall(r"class_path: ([\w.]+)", block.code):
        module, _, name = path.rpartition(".")
        if not module.startswith("my_"):
            assert exported_from(module, name) or re.search(rf"\b{name}\b", _source(module)), (
                f"{block.where}: {path}"
            )
    assert yaml.safe_load(block.code)


def _source(module: str) -> str:
    """Its text: importing a pipeline takes seconds."""
    path = ROOT / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.where)
def test_every_python_block_is_python(block):
    compile(block.code, block.where, "exec")
    if block.file and (ROOT / block.file).exists():
        _, shown = block.code.split("    ...\n")
        assert shown in (ROOT / block.file).read_text(), "a part of a file of the package"


@pytest.mark.slow
@pytest.mark.parametrize("command", MARKED, ids=str)
def test_settings_of_a_marked_command_exist(command):
    words = command.words
    args = parse(words[words.index("flowalign") + 1 :])
    with suppress_absent_data():
        _load(args)


@contextmanager
def suppress_absent_data():
    """Let pass that the data of a run file are not here: it was read up to there."""
    try:
        yield
    except ConfigError as error:
        absent = r"recipe\.(data: |teachers: the checkpoint )'\S+' does not exist"
        if not re.search(absent, str(error)):
            raise


def _load(args) -> None:
    if args.verb == "compare":
        for config in args.configs:
            load([*args.base, *config.split("+")], args.overrides)
    elif args.verb == "clip-pairs":
        load_typed(ClipPairs, args.config, args.overrides)
    elif args.verb == "reward" and args.action == "train":
        load_run(args.config, args.overrides)
    elif args.verb == "score":
        assert load_rewards(*args.rewards)[0]
    elif args.verb == "serve-reward":
        assert load_rewards(args.rewards)[0]
    elif args.verb in ("train", "eval", "sample", "check", "bench"):
        load(*read_settings(args))


RUN = [
    pytest.param(
        page, marks=pytest.mark.always if page.name == "README.md" else (), id=name_of(page)
    )
    for page in PAGES
    if blocks(page)
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs(page, desk):
    for block in blocks(page):
        desk.run(block)
