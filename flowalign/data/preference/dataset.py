"""Describe stored preference data and read it as examples of one kind."""

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
"""Number of rows that are searched for the scored dimensions of a dataset."""


@dataclass(frozen=True, kw_only=True)
class PreferenceDataset:
    """Stored preference data, with the settings that turn its rows into examples."""

    path: str
    """File, folder, or glob pattern of files."""
    kind: Kind = "pairs"
    """Kind of the examples."""
    schema: str = "auto"
    """Name of the reader. auto: detected from the columns."""
    root: str | None = None
    """Base folder of relative paths. None: the folder of the file."""
    dimensions: Sequence[str] = ()
    """Dimensions of the preferences to use. Empty: all."""
    mixed_shapes: bool = False
    """Whether to use pairs of media that differ in size or number of frames."""

    def open(self) -> Dataset:
        """Open the rows; raise ValueError if there are none or no schema fits them."""
        return open_dataset(self.path, self.schema, self.root)

    def read(
        self, labelled: bool = False, keep: Keep = lambda medium: medium
    ) -> tuple[list[Example], DropReport]:
        """Return the examples and a report of the dropped rows.

        `keep` replaces each used media item, for example to drop bytes that the dataset embeds and
        that would stay in memory. `labelled` skips samples without a label.

        Raises:
            ValueError: The dataset does not exist or lacks one of `dimensions`.
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
        """Raise ValueError for a conditioning that does not fit the data.

        It must not name scores that no row has. Data of kind attributes or captions allows none,
        because its prompts already contain attributes. If the words depend on scores, the first
        rows are read; no image or video is decoded.
        """
        if self.kind in ("attributes", "captions"):
            raise ValueError(
                f"recipe.data.kind {self.kind} adds attributes to prompts itself: set conditioning "
                "to null, or kind to samples"
            )
        scored: list[str] = []
        if conditioning.dims:
            rows = itertools.islice(self.open().iter_located(), _LOOKED_AT)
            scored = sorted({dim for _, record in rows for dim in record.ratings})
        conditioning.check(policy, dict.fromkeys(scored, 1.0))
