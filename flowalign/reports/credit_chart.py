"""Draw the credit of denoising steps from its record.

All lengths are inches, y grows downwards.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from flowalign.reports.canvas import INK, MARGIN, SOFT, Canvas, Scale

MOST_ROWS = 48
"""Largest number of samples that are drawn."""
Pictures = Mapping[int, Sequence[np.ndarray]]
"""Images by state, H x W x 3 for each of the first samples."""
_LEFT, _GAP = 0.95, 0.1
_NARROW, _BAR, _ROW = 0.22, 1.15, 0.27
_MOST_STATES = 10


@dataclass(frozen=True)
class CreditRecord:
    """Holds the credit of one prompt's samples; None where there is no number."""

    step: int
    """Index of the training step."""
    prompt: str
    """Prompt of the samples."""
    method: str
    """Name of the credit method's class."""
    rule: str
    """Sentence that says how the method credits a step."""
    weights: dict[str, float]
    """Weights of the reward dimensions that count."""
    sigmas: list[float]
    """Schedule of the samples."""
    states: list[int]
    """Indices of the valued states; the last is the finished sample."""
    values: list[list[float | None]]
    """Weighted reward of the completion of each state: samples by valued states."""
    credit: list[list[float | None]]
    """Credit, weighted over reward dimensions: samples by denoising steps; None where not
    credited."""
    advantage: list[list[float | None]]
    """Advantages: samples by denoising steps; None where not trained."""
    marked: list[list[bool]] | None
    """Steps that the method singles out, such as turning points: samples by denoising steps."""
    source_row: list[list[int]] | None
    """Index of the sample that computed state k of each sample, for rollouts that branch; else
    None."""

    @property
    def trained(self) -> list[int]:
        """Return the denoising steps in which some sample is trained or credited."""
        rows = [*self.advantage, *self.credit]
        steps = range(len(self.sigmas) - 1)
        return [k for k in steps if any(row[k] is not None for row in rows)]


def draw(record: CreditRecord, pictures: Pictures, png: Path) -> None:
    """Write the chart; states without images are left blank."""
    from matplotlib import rc_context

    with rc_context({"font.size": 9, "text.color": INK, "font.family": "DejaVu Sans"}):
        canvas = Canvas()
        _draw_heading(canvas, record)
        if record.source_row is None:
            _draw_paths(canvas, record, pictures)
            _draw_advantages(canvas, record)
        else:
            _draw_branches(canvas, record, record.source_row, pictures)
        canvas.save(png)


def _draw_heading(canvas: Canvas, record: CreditRecord) -> None:
    title = f"Training step {record.step}: what each denoising step earned"
    canvas.line(title, 0.3, fontsize=13, fontweight="bold")
    for line in textwrap.wrap(f"Prompt: {record.prompt}", 75)[:4]:
        canvas.line(line, 0.22, fontsize=10.5)
    terms = [f"{weight:g} {name}" for name, weight in record.weights.items()]
    reward = " + ".join(terms).replace("+ -", "- ")
    for text in (f"{record.method}: {record.rule}", f"Reward = {reward}"):
        for line in textwrap.wrap(text, 95):
            canvas.line(line, 0.19, color=SOFT)
    canvas.y += 0.12


def _draw_paths(canvas: Canvas, record: CreditRecord, pictures: Pictures) -> None:
    """Draw some samples, a row each: states with their images, and between them the steps."""
    scale, side = Scale(record.credit), _side(record)
    canvas.line("States, and the steps between them", 0.26, fontsize=11, fontweight="bold")
    what = "Pictures: each state completed by the ODE, without more noise, and its reward."
    canvas.line(what, color=SOFT)
    scale.draw(canvas, "Credit of a step")
    if record.marked is not None:
        what = "turning point" if record.method == "TurningPoint" else "singled out"
        canvas.star(MARGIN + 0.08, canvas.y + 0.03, 9)
        what = f"{what} in at least one reward dimension"
        canvas.text(MARGIN + 0.25, canvas.y + 0.03, what, ha="left", color=SOFT)
        canvas.y += 0.22
    columns = _columns(record)
    for place, k, is_state in columns:
        _draw_column_name(canvas, record, place, k, is_state)
    canvas.y += 0.45
    count = min([len(record.values), *map(len, pictures.values())] if pictures else [6])
    for b in range(min(count, len(record.values))):
        canvas.text(MARGIN, canvas.y + side / 2, f"sample {b}", ha="left")
        for place, k, is_state in columns:
            if is_state:
                image = pictures[k][b] if k in pictures else None
                canvas.picture(image, place, canvas.y, side)
                value = record.values[b][record.states.index(k)]
                canvas.text(place + side / 2, canvas.y + side + 0.12, _reward(value))
            else:
                _draw_step(canvas, place, record, scale, (b, k))
        canvas.y += side + 0.3
    canvas.y += 0.1


def _columns(record: CreditRecord) -> list[tuple[float, int, bool]]:
    """Return left edge, index and whether it is a state, in time order; states before steps."""
    chosen = np.linspace(0, len(record.states) - 1, min(_MOST_STATES, len(record.states)))
    states = [(record.states[round(i)], True) for i in chosen]
    steps = [(k, False) for k in record.trained]
    order = sorted(states + steps, key=lambda column: (column[0], not column[1]))
    widths = [_side(record) if is_state else _cell(record) for _, is_state in order]
    places = MARGIN + _LEFT + np.cumsum([0.0, *(width + _GAP for width in widths[:-1])])
    return [(float(x), k, is_state) for x, (k, is_state) in zip(places, order, strict=True)]


def _side(record: CreditRecord) -> float:
    """Return the side in inches of an intermediate state's image."""
    return 0.95 if len(record.states) <= 6 else 0.75


def _cell(record: CreditRecord) -> float:
    """Return the width in inches of a step; many are narrow and have no numbers."""
    many = len(record.trained)
    return 0.8 if many <= 6 else 0.62 if many <= 16 else _NARROW


def _draw_column_name(
    canvas: Canvas, record: CreditRecord, place: float, k: int, is_state: bool
) -> None:
    if not is_state:
        _draw_step_name(canvas, record, place, k, canvas.y + 0.29)
        return
    middle, last = place + _side(record) / 2, k == len(record.sigmas) - 1
    canvas.text(middle, canvas.y + 0.12, "finished" if last else f"state {k}", fontweight="bold")
    canvas.text(middle, canvas.y + 0.29, f"noise {record.sigmas[k]:.0%}", color=SOFT)


def _draw_step_name(canvas: Canvas, record: CreditRecord, x: float, k: int, y: float) -> None:
    name = f"step {k}" if _cell(record) > _NARROW else str(k)
    canvas.text(x + _cell(record) / 2, y, name, color=SOFT)


def _draw_step(
    canvas: Canvas, x: float, record: CreditRecord, scale: Scale, at: tuple[int, int]
) -> None:
    b, k = at
    number, y, width = record.credit[b][k], canvas.y + _side(record) / 2, _cell(record)
    colour = scale.colour(number)
    canvas.arrow(x, y, width, 0.42, facecolor=colour, edgecolor="#999999", linewidth=0.6)
    if width > _NARROW:
        canvas.text(x + width / 2 - 0.04, y, scale.label(number), color=scale.ink(number))
    if record.marked is not None and record.marked[b][k]:
        canvas.star(x + width / 2, y - 0.31, 11)


def _draw_advantages(canvas: Canvas, record: CreditRecord) -> None:
    """Draw the advantages of all samples by trained step."""
    scale, width = Scale(record.advantage), _cell(record)
    rows = range(min(len(record.advantage), MOST_ROWS))
    title = f"Advantage: credit compared within the prompt, {_how_many(record)}"
    canvas.line(title, 0.26, fontsize=11, fontweight="bold")
    scale.draw(canvas, "Advantage")
    places = [(MARGIN + _LEFT + i * width, k) for i, k in enumerate(record.trained)]
    right = MARGIN + _LEFT + len(places) * width + 0.45
    for x, k in places:
        _draw_step_name(canvas, record, x, k, canvas.y + 0.1)
    canvas.text(right, canvas.y + 0.1, "reward", color=SOFT)
    canvas.y += 0.24
    for b in rows:
        middle = canvas.y + _ROW / 2
        canvas.text(MARGIN, middle, f"sample {b}", ha="left")
        for x, k in places:
            number = record.advantage[b][k]
            canvas.box(x, canvas.y, width, _ROW, facecolor=scale.colour(number), edgecolor="white")
            if width > _NARROW:
                canvas.text(x + width / 2, middle, scale.label(number), color=scale.ink(number))
            if record.marked is not None and record.marked[b][k]:
                canvas.star(x + 0.1, middle, 7)
        canvas.text(right, middle, _reward(record.values[b][-1]))
        canvas.y += _ROW
    canvas.box(right, canvas.y, 0.4, 0.0, edgecolor="none")  # room for the rewards


def _draw_branches(
    canvas: Canvas, record: CreditRecord, source_row: list[list[int]], pictures: Pictures
) -> None:
    """Draw all samples as rows that are joined where states are shared; outcomes at the right."""
    scale, rows = Scale(record.advantage), range(min(len(record.advantage), MOST_ROWS))
    height = 0.62 if len(rows) <= 24 else 0.42
    title = f"From shared states to finished pictures: {_how_many(record)}"
    canvas.line(title, 0.26, fontsize=11, fontweight="bold")
    what = "A row is a sample. Where a bar spans several rows, these samples share one state."
    canvas.line(what, color=SOFT)
    canvas.line(
        "Bars that branch off one bar are alternatives: compare their pictures.", color=SOFT
    )
    if len({row[0] for row in source_row}) > 1:
        canvas.line("Lines separate samples of different initial noise.", color=SOFT)
    scale.draw(canvas, "Advantage")
    for i, k in enumerate(record.trained):
        _draw_bars(canvas, record, source_row, scale, (i, k), height)
    right = MARGIN + _LEFT + len(record.trained) * _BAR + 0.12
    canvas.text(right, canvas.y + 0.1, "picture and reward", ha="left", fontweight="bold")
    canvas.box(right, canvas.y, 1.3, 0.0, edgecolor="none")
    canvas.y += 0.42
    images = pictures.get(len(record.sigmas) - 1, ())
    for b in rows:
        if b and source_row[b][0] != source_row[b - 1][0]:
            canvas.box(MARGIN, canvas.y, right + 1.3 - MARGIN, 0.0, edgecolor=INK, linewidth=1.2)
        canvas.text(MARGIN, canvas.y + height / 2, f"sample {b}", ha="left")
        image = images[b] if b < len(images) else None
        canvas.picture(image, right, canvas.y + 0.03, height - 0.06)
        value = _reward(record.values[b][-1])
        canvas.text(right + height + 0.08, canvas.y + height / 2, value, ha="left")
        canvas.y += height


def _draw_bars(
    canvas: Canvas,
    record: CreditRecord,
    source_row: list[list[int]],
    scale: Scale,
    column: tuple[int, int],
    height: float,
) -> None:
    """Draw one step: a bar for each state that it reached, over the rows that share it."""
    i, k = column
    x, rows = MARGIN + _LEFT + i * _BAR, range(min(len(source_row), MOST_ROWS))
    canvas.text(x + _BAR / 2, canvas.y + 0.1, f"step {k}", fontweight="bold")
    canvas.text(x + _BAR / 2, canvas.y + 0.27, f"noise {record.sigmas[k]:.0%}", color=SOFT)
    for _, members in groupby(rows, key=lambda b: source_row[b][k + 1]):
        block = list(members)
        number = next((n for b in block if (n := record.advantage[b][k]) is not None), None)
        y, tall = canvas.y + 0.42 + block[0] * height, len(block) * height
        colour = scale.colour(number)
        canvas.box(x + 0.02, y + 0.02, _BAR - 0.04, tall - 0.04, facecolor=colour, edgecolor="none")
        lines = [scale.label(number), f"{len(block)} samples" if len(block) > 1 else ""]
        text = "\n".join(filter(None, lines))
        canvas.text(x + _BAR / 2, y + tall / 2, text, color=scale.ink(number))


def _reward(value: float | None) -> str:
    if value is None:
        return "failed"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.1f}"


def _how_many(record: CreditRecord) -> str:
    number = len(record.advantage)
    if number > MOST_ROWS:
        return f"the first {MOST_ROWS} of {number} samples"
    return f"{number} sample{'s' * (number != 1)}"
