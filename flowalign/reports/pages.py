"""Render pages from the templates of this folder: self-contained, and safe for any name."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2


def render(
    template: str, filters: Mapping[str, Callable[..., Any]] | None = None, **values: Any
) -> str:
    """Return a page; what a run file or a prompt says is escaped, and no name may be missing."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= dict(filters or {})
    return environment.get_template(template).render(**values)
