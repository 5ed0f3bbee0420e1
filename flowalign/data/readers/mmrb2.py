"""Read Multimodal RewardBench 2: pairs of answers to a prompt, for text-to-image and editing.

The benchmark's own files store prompts and answers as lists of texts and images; the table on the
Hub has separate columns for images. The other two tasks compare texts, which is not supported.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flowalign.data.media.media import Media
from flowalign.data.media_record import Record
from flowalign.data.readers.fields import Fields, parse_choice
from flowalign.data.readers.schema import Schema
from flowalign.data.readers.stream_rows import RowProblem

_SIDES = ("response_a", "response_b")
_IMAGE = re.compile(r"\s*<image_\d+>\s*")
_Content = tuple[str, list[Media]]


def _record(rows: Sequence[Fields], default_id: str) -> Record:
    """Read `chosen`, which is A or B; images in the prompt are the references."""
    row = rows[0]
    content = _read_list if "prompt_content" in row else _read_columns
    prompt, references = content(row, "prompt")
    chosen = row.text("chosen")
    ranks = parse_choice(chosen.upper(), ("A",), ("B",), ())
    if ranks is None:
        raise RowProblem(f"chosen is {chosen!r}; expected A or B")
    used = [f"{side}_{part}" for side in ("prompt", *_SIDES) for part in ("text", "images")]
    return Record(
        row.text("pair_id") or row.text("id") or default_id,
        prompt,
        [_take_only(content(row, side)[1], side) for side in _SIDES],
        references,
        {"overall": ranks},
        metadata=row.rest("id", "pair_id", "prompt_content", "chosen", *_SIDES, *used),
    )


def _take_only(media: Sequence[Media], side: str) -> Media:
    if len(media) != 1:
        raise RowProblem(
            f"{side} has {len(media)} images; only pairs of one image each are read, "
            "the tasks t2i and edit"
        )
    return media[0]


def _read_list(row: Fields, name: str) -> _Content:
    """Return texts and images of a list of [kind, content], the format of the benchmark's files."""
    value = row.row.fields.get(name)
    parts = value.get("response_content") if isinstance(value, Mapping) else None
    parts = row.row.fields.get("prompt_content") if name == "prompt" else parts
    if not isinstance(parts, list) or not all(map(_is_part, parts)):
        raise RowProblem(f"{name} is not a list of [text or image, content]")
    texts = [content for kind, content in parts if kind == "text"]
    images = [row.of(content, f"an image of {name}") for kind, content in parts if kind == "image"]
    return "\n".join(texts), images


def _is_part(part: Any) -> bool:
    return isinstance(part, list) and len(part) == 2 and part[0] in ("text", "image")


def _read_columns(row: Fields, name: str) -> _Content:
    """Return text and images of the columns `name_text` and `name_images` of the Hub's table."""
    texts = [part for part in _IMAGE.split(row.text(f"{name}_text")) if part]
    some = bool(row.row.fields.get(f"{name}_images"))  # text-to-image has an empty list
    return "\n".join(texts), row.media(f"{name}_images") if some else []


MMRB2 = Schema(
    "mmrb2",
    (
        ("prompt_content", "prompt_text"),
        ("response_a", "response_a_images"),
        ("response_b", "response_b_images"),
        ("chosen",),
    ),
    _record,
)
