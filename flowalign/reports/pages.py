"""Render the templates of this folder: self-contained pages, and the cards of models."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2


def render(
    template: str, filters: Mapping[str, Callable[..., Any]] | None = None, **values: Any
) -> str:
    """Return a page or a Markdown text; missing names raise, and pages escape their values."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=".html." in template,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= dict(filters or {})
    return environment.get_template(template).render(**values)


def fit_scale(intervals: Sequence[tuple[float, float]], mark: float = 0.0) -> tuple[float, float]:
    """Return the offset and the factor that map a mark and all intervals to 0 to 100."""
    low = min([mark, *(low for low, _ in intervals)])
    high = max([mark, *(high for _, high in intervals)])
    return low, 100 / ((high - low) or 1.0)
