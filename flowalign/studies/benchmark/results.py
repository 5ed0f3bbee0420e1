"""List the deviations of an evaluation from its card, and write its results."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowalign.studies.benchmark.card import Card
from flowalign.studies.benchmark.statistics import REPEATS, Estimate, ResultLine
from flowalign.utils.files import write_json, write_text


@dataclass(frozen=True)
class Deviation:
    """Setting that differs from the card, or that the card leaves open."""

    setting: str
    """Name of the setting."""
    card: str
    """Value of the card; `not fixed` if the authors leave it open."""
    here: str
    """Value of this evaluation."""


@dataclass(frozen=True)
class Used:
    """Settings of an evaluation."""

    policy: Mapping[str, Any]
    """Settings of the policy."""
    num_steps: int
    """Number of denoising steps."""
    copies: int
    """Number of images per row."""
    seed: int
    """Seed of the initial noises."""
    rows: int
    """Number of evaluated rows."""
    total_rows: int
    """Number of rows of the prompt file."""
    scorer: str
    """Scorer of `--rewards` or `--scores`; empty for that of the card."""


def find_deviations(card: Card, used: Used) -> tuple[list[Deviation], list[Deviation]]:
    """Return the settings that differ from the card, and those that it leaves open."""
    protocol, size = card.protocol, _read_size(used.policy)
    guidance = used.policy.get("embedded_guidance") or used.policy.get("guidance")
    pairs = [
        ("images per row", protocol.images_per_prompt, used.copies),
        ("denoising steps", protocol.num_steps, used.num_steps),
        ("guidance", protocol.guidance, guidance),
        ("height", protocol.height, size.get("height")),
        ("width", protocol.width, size.get("width")),
        ("seed", protocol.seed, used.seed),
        ("rows", used.total_rows, used.rows),
    ]
    differing = [
        Deviation(name, f"{fixed:g}", "not set" if here is None else f"{here:g}")
        for name, fixed, here in pairs
        if fixed is not None and fixed != here
    ]
    opened = [
        Deviation(name, "not fixed", "not set" if here is None else f"{here:g}")
        for name, fixed, here in pairs
        if fixed is None
    ]
    if used.scorer:
        differing.append(Deviation("scorer", card.scorer, used.scorer))
    elif card.differences:
        differing.append(Deviation("scorer", card.scorer, card.differences))
    if card.prompts.sha256 is None and not card.prompts.bundled:
        opened.append(Deviation("checksum of the prompt file", "not known", "not checked"))
    return differing, opened


def _read_size(policy: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings that hold the size of the images or videos."""
    return policy.get("video") or policy


_LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}"}
INTERVAL = (
    f"Brackets: 95 % interval of {REPEATS} bootstrap resamples of whole prompts; "
    "differences use the same resamples for both models."
)


@dataclass(frozen=True)
class Results:
    """Results of a benchmark."""

    name: str
    """Name of the card."""
    card: Card
    """Protocol of the benchmark."""
    models: Sequence[str]
    """Names of the models, the base first."""
    digests: Sequence[str]
    """Hashes of their weights."""
    lines: Sequence[ResultLine]
    """Numbers of all models."""
    deviations: Sequence[Deviation]
    """Settings that differ from the card."""
    left_open: Sequence[Deviation]
    """Settings that the card leaves open."""
    settings: Mapping[str, Any]
    """Settings of the evaluation."""
    images: int
    """Number of images or videos per model."""


def write_results(folder: Path, results: Results) -> None:
    """Write `results.json`, `results.md` and `results.tex`."""
    content = {
        "benchmark": results.name,
        "title": results.card.title,
        "source": results.card.source,
        "models": list(results.models),
        "weights": dict(zip(results.models, results.digests, strict=True)),
        "images": results.images,
        "resamples": REPEATS,
        "lines": [asdict(line) for line in results.lines],
        "deviations": [asdict(one) for one in results.deviations],
        "not_fixed": [asdict(one) for one in results.left_open],
        "published": [asdict(one) for one in results.card.published],
        "settings": dict(results.settings),
    }
    write_json(folder / "results.json", content)
    write_text(folder / "results.md", to_markdown(results))
    write_text(folder / "results.tex", to_latex(results))


def heads(results: Results) -> list[str]:
    """Return the column heads of the table."""
    trained = results.models[1:]
    later = ["change"] if len(trained) == 1 else [f"change: {name}" for name in trained]
    return ["metric", "prompts", *results.models, *later]


def rows(results: Results) -> list[list[str]]:
    """Return the cells of the table as text."""
    return [
        [
            f"{line.metric}: {line.group}" if line.group else line.metric,
            str(line.prompts),
            *(show(one) for one in line.scores),
            *(show(one, signed=True) for one in line.differences),
        ]
        for line in results.lines
    ]


def show(one: Estimate, signed: bool = False) -> str:
    """Return a number with its interval, such as `53.1 [50.2, 56.0]`."""
    sign = "+" if signed else ""
    digits = choose_digits(one)
    value = f"{one.value:{sign}.{digits}f}"
    if math.isnan(one.low):
        return f"{value} [no interval]"
    return f"{value} [{one.low:{sign}.{digits}f}, {one.high:{sign}.{digits}f}]"


def choose_digits(one: Estimate) -> int:
    """Return the number of decimals that shows two digits of the half width of the interval."""
    half = (one.high - one.low) / 2
    if not half > 0:
        return 3
    return min(max(1 - math.floor(math.log10(half)), 0), 6)


def describe(results: Results) -> list[str]:
    """Return sentences on deviations and open settings."""
    card = results.card
    told = [f"{card.title} ({card.source}), {results.images} images per model. {INTERVAL}"]
    told += [
        f"Deviation: {one.setting} is {one.here}, the card says {one.card}."
        for one in results.deviations
    ] or ["No deviation from the card."]
    told += [
        f"Not fixed by the authors: {one.setting}, here {one.here}." for one in results.left_open
    ]
    told.append(
        "Initial noises are those of flowalign, so images differ from those of the official script."
    )
    return told


def to_markdown(results: Results) -> str:
    """Return the table with deviations and published numbers."""
    head = heads(results)
    cells = [head, ["---"] * len(head), *rows(results)]
    text = [
        " | ".join(["", *(cell.replace("|", "\\|") for cell in row), ""]).strip() for row in cells
    ]
    text += ["", *(f"- {sentence}" for sentence in describe(results))]
    if results.card.published:
        text += ["", "| published | metric | value | settings | source |", "|---|---|---|---|---|"]
        text += [
            f"| {one.model} | {one.metric} | {one.value:g} | {one.settings} | {one.source} |"
            for one in results.card.published
        ]
    return "\n".join(text) + "\n"


def to_latex(results: Results) -> str:
    """Return the table for the package booktabs, with the deviations as comments."""
    head = heads(results)
    lines = [f"% {sentence}" for sentence in describe(results)]
    lines += [f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", "\\toprule", _latex_row(head)]
    lines += ["\\midrule", *map(_latex_row, rows(results)), "\\bottomrule", "\\end{tabular}"]
    return "\n".join(lines) + "\n"


def _latex_row(cells: Sequence[str]) -> str:
    escaped = ["".join(_LATEX.get(letter, letter) for letter in cell) for cell in cells]
    return " & ".join(escaped) + r" \\"
