"""Recognise the kind of a YAML file, to name the matching command in errors."""

from collections.abc import Collection
from dataclasses import MISSING, fields

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
