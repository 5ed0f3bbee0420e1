"""Count the code lines of the three packages by purpose, and the share of guards.

    python assets/bench/code_lines.py

Blank lines, comments and docstrings do not count. Guards are the lines of a `raise`, of a
text that is assigned just before it, and of functions named check, refuse or require.
"""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

PURPOSES = {
    "methods": "functional losses credit gradient_paths",
    "rare systems": "extra",
    "model families": "../pipelines",
    "reward models": "../reward_models",
    "rewards: combining, serving": "rewards",
    "reading data": "data",
    "scoring, pairing, votes": "curation",
    "training of rewards": "reward_training",
    "plans, memory": "runs/planning.py runs/run_memory.py runs/capacity.py runs/bench.py",
    "training: loops, settings": "training distributed",
    "sampling": "sampling",
    "run files, runs": "runs",
    "studies, reports": "studies reports",
    "Python, command line": "api cli __init__.py __main__.py",
    "shared values": "types conditioning",
    "utilities": "utils",
}
"""Folders and files of each purpose, relative to `flowalign`; the first match counts."""
NOT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def read_lines(path: Path) -> tuple[set[int], set[int]]:
    """Return the numbers of all code lines of a file, and of those in guards."""
    text = path.read_text(encoding="utf-8")
    code = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in (*NOT_CODE, tokenize.ENDMARKER)
    }
    guards = set[int]()
    for node in ast.walk(ast.parse(text)):
        guards |= _lines_of_texts(getattr(node, "body", None))
        lines = range(getattr(node, "lineno", 0), getattr(node, "end_lineno", 0) + 1)
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                code -= set(lines)
            case ast.Raise():
                guards |= set(lines)
            case ast.FunctionDef(name=name) if name.strip("_").startswith(
                ("check", "refuse", "require")
            ):
                guards |= set(lines)
    return code, code & guards


def _lines_of_texts(block: object) -> set[int]:
    """Return the lines of the texts that a block assigns before a `raise` at its end."""
    lines = set[int]()
    if isinstance(block, list) and block and isinstance(block[-1], ast.Raise):
        for one in block[:-1]:
            if isinstance(one, ast.Assign) and isinstance(one.value, ast.JoinedStr | ast.Constant):
                lines |= set(range(one.lineno, one.end_lineno + 1))
    return lines


def main() -> None:
    """Print a line per purpose."""
    places = [
        (Path("flowalign", part), purpose)
        for purpose, parts in PURPOSES.items()
        for part in parts.split()
    ]
    known = {place.resolve(): purpose for place, purpose in places}
    code, guards = Counter[str](), Counter[str]()
    for package in ("flowalign", "pipelines", "reward_models"):
        for path in sorted(Path(package).rglob("*.py")):
            inside = [path.resolve(), *path.resolve().parents]
            purpose = next(known[place] for place in inside if place in known)
            lines, some = read_lines(path)
            code[purpose] += len(lines)
            guards[purpose] += len(some)
    for purpose, count in code.most_common():
        print(f"{count:7,d}  {guards[purpose] / count:5.1%} guards  {purpose}")  # noqa: T201
    total = code.total()
    print(f"{total:7,d}  {guards.total() / total:5.1%} guards  in all")  # noqa: T201


if __name__ == "__main__":
    main()
