"""Describe stored preference data, and read them as examples of one kind."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from flowalign.data.preference.attributes import read_attributes, read_captions
from flowalign.data.preference.convert import read_pairs, read_samples
from flowalign.data.preference.dropped import DropReport
from flowalign.data.preference.pairs import Example, Keep, Kind
from flowalign.data.readers import Dataset, open_dataset
from flowalign.types import Policy, PromptConditioning

_LOOKED_AT = 200
"""Rows of a dataset that are searched for the dimensions that it scores."""


@dataclass(frozen=True, kw_only=True)
class PreferenceDataset:
    """Stored preference data, and the way in which their rows become examples."""

    path: str
    """File, folder, or pattern of files."""
    kind: Kind = "pairs"
    """Kind of the examples."""
    schema: str = "auto"
    """Name of the reader. auto: found from the columns."""
    root: str | None = None
    """Folder where relative paths begin. None: beside the file."""
    dimensions: Sequence[str] = ()
    """Dimensions whose preferences are used. Empty: all."""
    mixed_shapes: bool = False
    """Whether pairs whose media differ in size or frames are used."""

    def open(self) -> Dataset:
        """Open the rows; raise ValueError if there are none, or no schema fits them."""
        return open_dataset(self.path, self.schema, self.root)

    def read(
        self, labelled: bool = False, keep: Keep = lambda medium: medium
    ) -> tuple[list[Example], DropReport]:
        """Read the examples, and report what was dropped.

        Bytes of media that the dataset holds stay in memory unless `keep` drops them. `labelled`
        skips samples without a label.

        Raises:
            ValueError: The dataset does not exist, or has no such dimension.
        """
        rows, report = self.open(), DropReport()
        if self.kind == "pairs":
            pairs = read_pairs(rows, self.dimensions, self.mixed_shapes, keep, report)
            return [*pairs], report
        if self.kind == "samples":
            samples = read_samples(rows, self.dimensions, labelled, keep, report)
            return [*samples], report
        read = read_attributes if self.kind == "attributes" else read_captions
        return [*read(rows, keep, report)], report

    def check_conditioning(self, conditioning: PromptConditioning, policy: Policy) -> None:
        """Raise ValueError for words of scores that no row has, or beside those of attributes.

        The first rows are read if the words are about scores, and no medium is decoded.
        """
        if self.kind in ("attributes", "captions"):
            raise ValueError(
                f"recipe.data.kind {self.kind} asks with attributes of its own: set conditioning "
                "to null, or kind to samples"
            )
        scored: list[str] = []
        if conditioning.dims:
            rows = itertools.islice(self.open().iter_located(), _LOOKED_AT)
            scored = sorted({dim for _, record in rows for dim in record.ratings})
        conditioning.check(policy, dict.fromkeys(scored, 1.0))
