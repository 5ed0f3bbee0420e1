"""Read the kinds of examples that a stored dataset can be trained on as."""

import itertools
from collections.abc import Sequence
from typing import Literal

from flowalign.data.preference.attributes import read_attributes, read_captions
from flowalign.data.preference.convert import Keep, read_pairs, read_samples
from flowalign.data.preference.dropped import DropReport
from flowalign.data.preference.pairs import Example
from flowalign.data.readers import open_dataset
from flowalign.types import Dressing, Policy

Kind = Literal["pairs", "samples", "attributes", "captions"]
"""Kind of the rows of a dataset: pairs, samples with binary labels, media that are compared with
themselves under texts of good and bad attributes, and samples of these with both in the prompt."""

_LOOKED_AT = 200
"""Rows of a dataset that are searched for the dimensions that it scores."""


def check_dressing(
    dressing: Dressing, policy: Policy, kind: Kind, path: str, schema: str, root: str | None
) -> None:
    """Raise ValueError for words of scores that no row has, or beside those of attributes.

    The first rows of the dataset are read if the words are about scores, and no medium is decoded.
    """
    if kind in ("attributes", "captions"):
        raise ValueError(
            f"recipe.data.kind {kind} asks with attributes of its own: set dressing to null, or "
            "kind to samples"
        )
    scored: list[str] = []
    if dressing.dims:
        rows = itertools.islice(open_dataset(path, schema, root).located(), _LOOKED_AT)
        scored = sorted({dim for _, record in rows for dim in record.ratings})
    dressing.check(policy, dict.fromkeys(scored, 1.0))


def read_examples(
    kind: Kind,
    path: str,
    schema: str,
    root: str | None,
    dimensions: Sequence[str],
    mixed_shapes: bool,
    labelled: bool,
    keep: Keep,
) -> tuple[list[Example], DropReport]:
    """Read the examples of a file, and a report of what was dropped.

    Raises:
        ValueError: The dataset does not exist, or has no such dimension.
    """
    if kind == "pairs":
        pairs, dropped = read_pairs(path, schema, root, dimensions, mixed_shapes, keep)
        return [*pairs], dropped
    if kind == "samples":
        samples, dropped = read_samples(path, schema, root, dimensions, labelled, keep)
        return [*samples], dropped
    read = read_attributes if kind == "attributes" else read_captions
    examples, dropped = read(path, schema, root, keep)
    return [*examples], dropped
