"""Turn what the parser of run files says of a mistake into a few lines for a person."""

import difflib
import importlib
import re
from collections.abc import Mapping, Sequence

from jsonargparse import ArgumentParser

from flowalign.runs.compose import origin_of
from flowalign.utils.setting_groups import options, parser_of


def readable(message: str, config: str, parser: ArgumentParser, origins: Mapping[str, str]) -> str:
    """Name the file and key of a mistake, what it is, and suggest what was meant."""
    lines = [line.strip(" -") for line in message.splitlines() if line.strip()]
    keys = [found[1] for line in lines if (found := _KEY.match(line))]
    key = ".".join(keys)
    file = origin_of(origins, _inside(key, _unknown_option(message) or "")) or config
    what = _what(lines, bool(keys))
    hint = None if _NO_MAPPING in what else _did_you_mean(message, key, parser)
    where = f"{file}: {key}" if keys else file
    return "\n".join([f"{where}: {what}", *([hint] if hint else [])])


def _what(lines: Sequence[str], has_key: bool) -> str:
    """Return what is wrong: if its key is known, the innermost line that says anything."""
    wrong = [line for line in lines if not _NOISE.match(line) and not _KEY.match(line)]
    what = (wrong[-1] if has_key else "\n".join(wrong)) if wrong else lines[0]
    if what.startswith("Expected a dot import path"):  # or one of some words
        what = next((line for line in wrong if line.startswith("Expected a typing.Literal")), what)
    given = next((line[13:] for line in lines if line.startswith("Given value: ")), what)
    if what.startswith(_NO_GROUP) and not given.startswith("{") and "Got value" not in what:
        value = given.removeprefix("Unable to load config ").strip("'")
        return f"is {'null' if value == 'None' else value}; {_NO_MAPPING}"
    if what.startswith("Expected") and "Got value" not in what and given not in what:
        what += f", not {given}"
    return what if len(what) <= _LONGEST else f"{what[:_LONGEST]}..."


_LONGEST = 400
_NO_MAPPING = "it must be a mapping of settings"
_NO_GROUP = ("Unable to load config", "Not a valid subclass of")
_KEY = re.compile(r'Parser key "([\w.]+)":$')
_NOISE = re.compile(
    r"Does not validate against any|Subtypes:|Errors:|Expected a <class '(NoneType|list)'>|"
    r"Given value type:|Given value: |Problem with given class_path '[\w.]+':$|"
    r"Subclass types expect one of:|a class path \(str\)|a dict with|Parser key .*Unable to load"
)
_UNKNOWN = re.compile(
    r"(?:unrecognized arguments: -*|ambiguous option: -*|"
    r"Group '([\w.]+)' does not accept option '|Option ')([\w.]+)"
)
_MISPLACED = {
    "Not a valid subclass of": "settings of a component stand under its init_args",
    " is abstract": "name a class_path here, or a run file before this one that does",
}
"""Advice about errors of components as a whole."""


def _did_you_mean(message: str, key: str, parser: ArgumentParser) -> str | None:
    """The nearest allowed names to the one that an error message complains about below a key."""
    if found := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message):
        return _nearest(found[2], dir(importlib.import_module(found[1])))
    if option := _unknown_option(message):
        if option.rpartition(".")[2] == "images" and "WanI2V" in message:
            return "a first frame is the field `image` of each row of the prompts file today"
        paths = re.findall(r"class_path '([\w.]+)'", message)
        known = options(parser_of(paths[-1]) if paths else parser)
        return _nearest(option, [_inside(key, name) for name in known], key)
    return next((hint for words, hint in _MISPLACED.items() if words in message), None)


def _unknown_option(message: str) -> str | None:
    """Return the option that a run or a component does not have, as that one names it."""
    found = _UNKNOWN.search(message)
    return _inside(found[1] or "", found[2]) if found else None


def _nearest(word: str, known: Sequence[str], key: str = "") -> str:
    """Names like `word`, which stands below `key`, or all that are allowed in its place."""
    parent, _, last = _inside(key, word).rpartition(".")
    beside = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == parent}
    beside = {name: k for name, k in beside.items() if not name.startswith("_")}
    if not beside and parent != key:  # it stands in something that is unknown itself
        return _nearest(word.rpartition(".")[0], known, key)
    near = difflib.get_close_matches(last, beside, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(beside[name] for name in near)}?"
    return f"allowed here: {', '.join(beside)[:200] or 'nothing'}"


def _inside(key: str, name: str) -> str:
    """Return the dotted name of `name` below `key`, either of which may be empty."""
    return ".".join(part for part in (key, name) if part)
