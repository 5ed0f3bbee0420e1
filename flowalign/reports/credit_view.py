"""Prepare the credit of denoising steps for a page: tables of states, steps and advantages."""

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
from PIL import Image

from flowalign.reports.pages import PALETTE
from flowalign.reports.records import read_json
from flowalign.reports.samples import cut_grid, encode_images
from flowalign.utils.tracking import MAX_ROWS, PLACES, CreditRecord

_MAX_STATES = 10
_MAX_LABELLED_STEPS = 16
"""Largest number of steps with space for a number in each cell."""
Cells = Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class Cell:
    """Cell of a table: a state with its image and reward, or a coloured number."""

    text: str = ""
    colour: str = ""
    """Background of a number; empty for a state."""
    image: str = ""
    """Address of the image; empty without one."""
    is_arrow: bool = False
    is_marked: bool = False
    rows: int = 1
    """Number of rows that the cell spans."""
    name: str = ""
    """Tooltip."""


@dataclass(frozen=True)
class CreditTable:
    """Table of samples by states and steps."""

    title: str
    notes: Sequence[str]
    scale: "Scale"
    heads: Sequence[tuple[str, str]]
    """Name and noise level of each column."""
    rows: Sequence[Sequence[Cell]]
    """Cells of each sample."""
    separated: Collection[int] = ()
    """Rows whose initial noise differs from that of the row above."""


class Scale:
    """Map from numbers to colours, from orange to blue, symmetric around 0."""

    def __init__(self, cells: Cells):
        numbers = [abs(number) for row in cells for number in row if number is not None]
        self.most = max(numbers, default=0.0) or 1.0
        self.digits = min(max(2, 1 - math.floor(math.log10(self.most))), 4)

    def colour(self, number: float | None) -> str:
        """Return the CSS colour of a cell; grey if there is no number."""
        if number is None:
            return "#88888840"
        opacity = round(200 * min(1.0, abs(number) / self.most))
        return f"{PALETTE[0] if number > 0 else PALETTE[1]}{opacity:02x}"

    def label(self, number: float | None) -> str:
        """Format a number with its sign; zero has none."""
        if number is None:
            return ""
        text = f"{number:+.{self.digits}f}"
        return text if text.strip("+-0.") else text[1:]

    def cell(self, number: float | None, with_text: bool = True, is_marked: bool = False) -> Cell:
        """Return the cell of a number."""
        label = self.label(number)
        text = label if with_text else ""
        return Cell(text, self.colour(number), name=label, is_marked=is_marked)


@dataclass(frozen=True)
class CreditView:
    """Credit record with its tables."""

    record: CreditRecord
    tables: Sequence[CreditTable]


def read_credit(folder: Path) -> list[CreditView]:
    """Return the credit of the first and the last step that has a record and its images."""
    views = []
    for files in (sorted(folder.glob("step-*.json")), sorted(folder.glob("step-*.json"))[::-1]):
        view = next(filter(None, map(_read, files)), None)
        if view and view.record.step not in [known.record.step for known in views]:
            views.append(view)
    return views


def _read(file: Path) -> CreditView | None:
    """Return the record of a file; None if it or its images were truncated by an interruption."""
    if content := read_json(file):
        record = CreditRecord(**content)
        with contextlib.suppress(OSError), Image.open(file.with_suffix(".png")) as grid:
            number = record.num_images * len(record.image_states)
            images = encode_images(cut_grid(grid.convert("RGB"), number, len(record.image_states)))
            return CreditView(record, make_tables(record, images, _read_maps(file, record)))
    return None


def _read_maps(file: Path, record: CreditRecord) -> list[str]:
    """Return the addresses of the maps of a record; empty if it has none."""
    if not record.place_steps:
        return []
    with Image.open(file.with_name(PLACES.format(file.stem))) as grid:
        columns = len(record.place_steps)
        return encode_images(cut_grid(grid.convert("RGB"), record.num_images * columns, columns))


def make_tables(
    record: CreditRecord, images: Sequence[str] = (), maps: Sequence[str] = ()
) -> list[CreditTable]:
    """Return the tables of a record, from the addresses of its images and maps."""
    columns = len(record.image_states)
    by_place = {
        (b, k): images[b * columns + i]
        for b in range(record.num_images if images else 0)
        for i, k in enumerate(record.image_states)
    }
    positions = [_place_table(record, by_place, maps)] if maps else []
    if record.source_row is None:
        return [_path_table(record, by_place), _advantage_table(record), *positions]
    return [_branch_table(record, record.source_row, by_place), *positions]


def _path_table(record: CreditRecord, images: Mapping[tuple[int, int], str]) -> CreditTable:
    """Return a table of some samples: states with images, separated by the credit of the steps."""
    scale = Scale(record.credit)
    chosen = np.linspace(0, len(record.states) - 1, min(_MAX_STATES, len(record.states)))
    states = {record.states[round(i)]: round(i) for i in chosen}
    # A state comes before the step that leaves it.
    columns = sorted([(k, 0) for k in states] + [(k, 1) for k in record.trained])

    def cell(b: int, k: int, is_step: int) -> Cell:
        if is_step:
            return replace(_step_cell(record, scale, record.credit, b, k), is_arrow=True)
        return Cell(_reward(record.values[b][states[k]]), image=images.get((b, k), ""))

    notes = ["Images: each state completed by the ODE, without further noise, and its reward."]
    if record.marked is not None:
        what = "turning point" if record.method == "TurningPoint" else "marked"
        notes.append(f"\u2605 {what} in at least one reward dimension.")
    count, end = min(record.num_images or 6, len(record.values)), len(record.sigmas) - 1
    return CreditTable(
        "Credit: states, separated by the steps between them",
        notes,
        scale,
        [
            (f"step {k}", "")
            if is_step
            else ("finished" if k == end else f"state {k}", f"noise {record.sigmas[k]:.0%}")
            for k, is_step in columns
        ],
        [[cell(b, *column) for column in columns] for b in range(count)],
    )


def _advantage_table(record: CreditRecord) -> CreditTable:
    """Return the advantages of all samples by trained step."""
    scale, rows = Scale(record.advantage), []
    for b in range(min(len(record.advantage), MAX_ROWS)):
        cells = [_step_cell(record, scale, record.advantage, b, k) for k in record.trained]
        rows.append([*cells, Cell(_reward(record.values[b][-1]))])
    title = f"Advantage: credit compared within the prompt, {_describe_number(record)}"
    heads = [(f"step {k}", "") for k in record.trained]
    return CreditTable(title, [], scale, [*heads, ("reward", "")], rows)


def _place_table(
    record: CreditRecord, images: Mapping[tuple[int, int], str], maps: Sequence[str]
) -> CreditTable:
    """Return maps of the advantage of latent positions by step, next to the finished images."""
    columns, end = len(record.place_steps), len(record.sigmas) - 1
    rows = []
    for b in range(record.num_images):
        cells = [Cell(image=address) for address in maps[b * columns : (b + 1) * columns]]
        last = Cell(_reward(record.values[b][-1]), image=images.get((b, end), ""))
        rows.append([*cells, last])
    return CreditTable(
        f"Advantage of latent positions: {record.num_images} samples",
        ["A map has the positions of the image: blue is above 0, orange below."],
        Scale([[record.place_scale]]),
        [*((f"step {k}", "") for k in record.place_steps), ("image and reward", "")],
        rows,
    )


def _branch_table(
    record: CreditRecord, source_row: list[list[int]], images: Mapping[tuple[int, int], str]
) -> CreditTable:
    """Return all samples as rows, merged where they share states; final images are at the right."""
    scale, count = Scale(record.advantage), min(len(record.advantage), MAX_ROWS)
    cells: list[list[Cell]] = [[] for _ in range(count)]
    for k in record.trained:
        for _, members in groupby(range(count), key=lambda b, k=k: source_row[b][k + 1]):
            block = list(members)
            number = next((n for b in block if (n := record.advantage[b][k]) is not None), None)
            cells[block[0]].append(replace(scale.cell(number), rows=len(block)))
    end = len(record.sigmas) - 1
    for b, row in enumerate(cells):
        row.append(Cell(_reward(record.values[b][-1]), image=images.get((b, end), "")))
    initial = [row[0] for row in source_row[:count]]
    notes = [
        "A row is a sample. Where a bar spans several rows, these samples share one state.",
        "Bars that branch from one bar are alternatives: compare their images.",
    ]
    if len(set(initial)) > 1:
        notes.append("Thick lines separate samples of different initial noise.")
    heads = [(f"step {k}", f"noise {record.sigmas[k]:.0%}") for k in record.trained]
    return CreditTable(
        f"Advantage, from shared states to finished images: {_describe_number(record)}",
        notes,
        scale,
        [*heads, ("image and reward", "")],
        cells,
        [b for b in range(1, count) if initial[b] != initial[b - 1]],
    )


def _step_cell(record: CreditRecord, scale: Scale, numbers: Cells, b: int, k: int) -> Cell:
    """Return the cell of step k of sample b."""
    is_marked = record.marked is not None and record.marked[b][k]
    return scale.cell(numbers[b][k], len(record.trained) <= _MAX_LABELLED_STEPS, is_marked)


def _reward(value: float | None) -> str:
    if value is None:
        return "failed"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.1f}"


def _describe_number(record: CreditRecord) -> str:
    number = len(record.advantage)
    if number > MAX_ROWS:
        return f"the first {MAX_ROWS} of {number} samples"
    return f"{number} sample{'s' * (number != 1)}"
