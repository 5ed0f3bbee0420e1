"""Explain why settings cannot be parsed, and which command reads a file of another kind."""

import difflib
import importlib
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, fields
from functools import cache
from inspect import isclass

from jsonargparse import ArgumentParser

_LONGEST = 400
_NO_MAPPING = "it must be a mapping of settings"
_NO_GROUP = ("Unable to load config", "Not a valid subclass of")
_NO_ARGUMENTS = re.compile(r"'(\w+)' object has no attribute 'keys'$")
_WRONG_TYPE = re.compile(r"Expected a <class '(\w+)'>\. Got value: (.{1,80})$")
_KEY = re.compile(r'Parser key "([\w.]+)":$')
_NOISE = re.compile(
    r"Does not validate against any|Subtypes:|Errors:|Expected a <class '(NoneType|list)'>$|"
    r"Given value type:|Given value: |Problem with given class_path '[\w.]+':$|"
    r"Subclass types expect one of:|a class path \(str\)|a dict with|Parser key .*Unable to load"
)
_UNKNOWN = re.compile(r"(?:Group '([\w.]+)' does not accept option '|Option ')([\w.]+)")
_MISPLACED = {
    "Not a valid subclass of": "put the settings of a component under its init_args",
    " is abstract": "set class_path here, or in an earlier run file",
}
"""Hints for errors that concern a whole component."""
KINDS = {
    "Run": ({"recipe"}, "flowalign train FILE"),
    "RewardRun": ({"backbone", "head"}, "flowalign reward train FILE"),
    "UserEmbeddings": ({"backbone", "output"}, "flowalign users FILE"),
    "ClipPairs": ({"clips", "method"}, "flowalign clip-pairs FILE"),
    "Search": ({"width"}, "flowalign sample RUN_FILE --prompt TEXT --search FILE"),
    "Card": ({"metrics", "protocol"}, "flowalign eval RUN_FILE --benchmark FILE"),
    "RewardFile": ({"rewards"}, "flowalign score DATA --rewards FILE --out FOLDER"),
}
"""Identifying keys and command of each kind of file, by the name of the class it describes. A file
belongs to the first kind with all of its keys present."""


def explain(message: str, locate: Callable[[str], str], parser: ArgumentParser) -> str:
    """Return a message with the file and key of an error, its cause, and a suggestion.

    `locate` returns the file that contains a dotted key.
    """
    lines = [line.strip(" -") for line in message.splitlines() if line.strip()]
    keys = [found[1] for line in lines if (found := _KEY.match(line))]
    key = ".".join(keys)
    file = locate(_join(key, _find_unknown_option(message) or ""))
    what = _find_cause(lines, bool(keys))
    hint = None if _NO_MAPPING in what else _suggest(message, key, parser)
    where = f"{file}: {key}" if keys else file
    separator = " " if what.startswith("is ") else ": "
    return "\n".join([f"{where}{separator}{what}", *([hint] if hint else [])])


def _find_cause(lines: Sequence[str], has_key: bool) -> str:
    """Return the cause of an error: the innermost informative line if the key is known."""
    wrong = [line for line in lines if not _NOISE.match(line) and not _KEY.match(line)]
    what = (wrong[-1] if has_key else "\n".join(wrong)) if wrong else lines[0]
    if what.startswith("Expected a dot import path"):  # the setting may also be a Literal
        what = next((line for line in wrong if line.startswith("Expected a typing.Literal")), what)
    value = next((line[13:] for line in lines if line.startswith("Given value: ")), what)
    if what.startswith(_NO_GROUP) and not value.startswith("{") and "Got value" not in what:
        value = value.removeprefix("Unable to load config ").strip("'")
        return f"is {'null' if value == 'None' else value}; {_NO_MAPPING}"
    if found := _NO_ARGUMENTS.match(what):
        return f"init_args is of type {found[1]}; {_NO_MAPPING}"
    if found := _WRONG_TYPE.match(what):
        kind = "a text" if found[1] == "str" else f"of type {found[1]}"
        return f"is {'null' if found[2] == 'None' else found[2]}; it must be {kind}"
    if what == "Expected a <class 'tuple'>":
        return f"is {value}; it must be a list, such as [{value}]"
    if what.startswith("Expected") and "Got value" not in what and value not in what:
        what += f", not {value}"
    return what if len(what) <= _LONGEST else f"{what[:_LONGEST]}..."


def _suggest(message: str, key: str, parser: ArgumentParser) -> str | None:
    """Return the allowed names nearest to the unknown name in a message, or another hint."""
    if found := re.search(r"(?:No|module) '?([\w.]+)'? (?:has no )?attribute '?(\w+)", message):
        return _list_nearest(found[2], dir(importlib.import_module(found[1])))
    if option := _find_unknown_option(message):
        paths = re.findall(r"class_path '([\w.]+)'", message)
        inner = _build_component_parser(paths[-1]) if paths else parser
        known = [action.dest for action in inner._actions if not action.dest.endswith("help")]
        return _list_nearest(option, [_join(key, name) for name in known], key)
    return next((hint for words, hint in _MISPLACED.items() if words in message), None)


@cache
def _build_component_parser(path: str) -> ArgumentParser:
    """Return a parser for the settings of a class or of a function that builds a component."""
    module, _, name = path.rpartition(".")
    component = getattr(importlib.import_module(module), name)
    parser = ArgumentParser(exit_on_error=False)
    add = parser.add_class_arguments if isclass(component) else parser.add_function_arguments
    add(component, None)
    return parser


def _find_unknown_option(message: str) -> str | None:
    """Return the unknown option of a run or a component that a message names; None without one."""
    found = _UNKNOWN.search(message)
    return _join(found[1] or "", found[2]) if found else None


def _list_nearest(word: str, known: Sequence[str], key: str = "") -> str:
    """Return the names most similar to `word` below `key`, or all allowed names if none is."""
    parent, _, last = _join(key, word).rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == parent}
    siblings = {name: k for name, k in siblings.items() if not name.startswith("_")}
    if not siblings and parent != key:  # its parent is unknown itself
        return _list_nearest(word.rpartition(".")[0], known, key)
    if elsewhere := _find_elsewhere(last, siblings, known):
        return f"did you mean {' or '.join(elsewhere)}?"
    near = difflib.get_close_matches(last, siblings, n=3, cutoff=0.51)
    if near:
        return f"did you mean {' or '.join(siblings[name] for name in near)}?"
    return f"allowed here: {', '.join(siblings)[:200] or 'nothing'}"


def _find_elsewhere(word: str, siblings: Collection[str], known: Sequence[str]) -> list[str]:
    """Return names in other groups, if they are much like `word` and no sibling is."""
    if difflib.get_close_matches(word, siblings, n=1, cutoff=_MUCH_ALIKE):
        return []
    lasts = {name.rpartition(".")[2] for name in known}
    near = difflib.get_close_matches(word, lasts, n=1, cutoff=_MUCH_ALIKE)
    return [name for name in known if name.rpartition(".")[2] in near][:3]


_MUCH_ALIKE = 0.8


def _join(*names: str) -> str:
    """Return the dotted join of names, skipping empty names."""
    return ".".join(filter(None, names))


def describe_wrong_kind(kind: type, keys: Collection[str], file: str) -> str:
    """Return why a file with `keys` does not describe a `kind`; "" if it may.

    A file of another kind has keys that `kind` does not have, or lacks required keys.
    """
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    required = {
        field.name
        for field in fields(kind)  # type: ignore[arg-type]
        if field.default is MISSING and field.default_factory is MISSING
    }
    if known.issuperset(keys) and required <= set(keys):
        return ""
    found = next((name for name, (marks, _) in KINDS.items() if marks <= set(keys)), None)
    if found == kind.__name__ == "Run" and "policy" not in keys:
        return (
            f"{file} names no policy: layer it on the run file of a model, as in\n"
            f"flowalign check configs/models/sd35_medium.yaml {file}"
        )
    if found in (None, kind.__name__):
        return ""
    command = KINDS[found][1].replace(" FILE", f" {file}")
    return f"{file} is a file for another command: {command}"
