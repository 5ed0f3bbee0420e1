"""Charts of result pages show the numbers of the tables next to them."""

import importlib
from pathlib import Path

import pytest

FIGURES = Path(__file__).parents[2] / "assets" / "figures"

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(FIGURES)
    charts = importlib.import_module("page_charts")
CHARTS, PAGES, draw, read_table = charts.CHARTS, charts.PAGES, charts.draw, charts.read_table


def test_rows_are_those_of_the_named_table() -> None:
    text = (
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n| dimension | share |\n|---|---|\n| x | 81 % |\n\nend"
    )
    assert read_table(text, "dimension") == [{"dimension": "x", "share": "81 %"}]


@pytest.mark.parametrize("page", CHARTS)
def test_bars_have_the_lengths_in_the_table(page: str) -> None:
    text = (PAGES / f"{page}.md").read_text()
    assert f"assets/figures/{page}.png" in text
    chart = CHARTS[page]
    rows = read_table(text, chart.first)
    widths = [bar.get_width() for bar in draw(chart, rows).axes[0].patches]
    cells = [row[header] for header in chart.values for row in rows]
    assert [f"{width:g}" for width in widths] == [f"{float(c.split()[0]):g}" for c in cells]
