"""Describe stored preference data and read it as examples of one kind."""

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from flowalign.data.media_record import Record
from flowalign.data.preference.convert import drop_misfits, drop_short, read_pairs, read_samples
from flowalign.data.preference.preference_data import Example, Keep, Kind, Pair, Sample
from flowalign.data.preference.validate import DropReport
from flowalign.data.readers import Columns, Dataset, Source, open_dataset
from flowalign.types import ConditionedPrompt, InputSpec, Policy, PromptConditioning, insert_words
from flowalign.utils.ranges import NonNegativeInt

_NAMES = ("positive", "negative")


def _read_attributes(
    dataset: Dataset, as_captions: bool, keep: Keep, report: DropReport
) -> Iterator[Example]:
    """Yield the images or videos of the rows with texts `positive` and `negative`.

    Each is a pair with itself under both texts or, for an expert, a sample with both texts in the
    prompt. Rows without both texts are added to `report`.
    """
    for where, record in dataset.iter_located():
        if record.problem:
            report.add(record.problem)
        elif not all(isinstance(record.metadata.get(name), str) for name in _NAMES):
            report.add("missing texts positive and negative", where)
        else:
            asked = record.request()
            for medium in record.media:
                sample = Sample(record.prompt, keep(medium), references=asked.references)
                if as_captions:
                    conditioned = ConditionedPrompt(_find_text(record, *_NAMES))
                    yield replace(sample, conditioned=conditioned)
                else:
                    sample = replace(sample, mask=asked.mask)
                    good, bad = (_find_text(record, name) for name in _NAMES)
                    yield Pair(sample, sample, "attributes", targets=(good, bad), where=where)


def _find_text(record: Record, *names: str) -> str:
    """Return the prompt of a row, followed by the texts in its columns `names`."""
    words = [record.metadata[name] for name in names]
    return insert_words("{prompt}, {words}", record.prompt, words, ", ")


_LOOKED_AT = 200
"""Number of rows that are searched for the scored dimensions of a dataset."""
_CHECKED = 50
"""Number of rows that `check_rows` reads."""
_LONGEST = 200


@dataclass(frozen=True, kw_only=True)
class PreferenceDataset:
    """Stored preference data, with the settings that turn its rows into examples."""

    path: Source
    """File, folder or pattern of files; or a dataset or list in Python, see `open_dataset`."""
    kind: Kind = "pairs"
    """Kind of the examples. pairs: preference pairs. samples: samples with binary labels.
    attributes: samples with the texts `positive` and `negative`, which need a teacher. captions:
    labelled samples with both texts, for the same teacher."""
    schema: str = "auto"
    """Name of the dataset reader. auto: detected from the columns."""
    root: str | None = None
    """Base folder of relative paths. Null: the folder of the dataset."""
    columns: Columns | None = None
    """Columns of the dataset by their names in flowalign, such as `chosen: winner`; a list of
    columns becomes one list. Null: as they are."""
    dimensions: Sequence[str] = ()
    """Preference dimensions to use. Empty: all."""
    mixed_shapes: bool = False
    """Whether to use pairs with different sizes or numbers of frames, by cropping both."""
    skip_choices: NonNegativeInt = 0
    """Number of first pairs of each user that are not trained, because `flowalign users` embedded
    them; pairs without a user are kept. 0: none."""

    @property
    def name(self) -> str:
        """Return the path, or a word for a dataset in Python, for messages."""
        return os.fspath(self.path) if isinstance(self.path, str | os.PathLike) else "the dataset"

    def open_rows(self) -> Dataset:
        """Open the rows; raise ValueError if there are none or no schema fits them."""
        return open_dataset(self.path, self.schema, self.root, self.columns)

    def read(
        self, labelled: bool = False, keep: Keep = lambda medium: medium
    ) -> tuple[list[Example], DropReport]:
        """Return the examples and a report of the dropped rows.

        `keep` replaces each used media item, for example to drop bytes that the dataset embeds and
        that would stay in memory. `labelled` skips samples without a label.

        Raises:
            ValueError: The dataset does not exist or lacks one of `dimensions`.
        """
        report = DropReport()
        examples = self._read(self.open_rows(), labelled, keep, report)
        return [*_skip_first(examples, self.skip_choices)], report

    def check_rows(self, input_spec: InputSpec, num_frames: int | None = None) -> list[Example]:
        """Return the examples of the first rows, and raise ValueError if none of them can be used.

        No image or video is decoded, but the headers of their files are read. `input_spec` is the
        one of the policy, whose references the rows must have. Clips shorter than `num_frames`
        cannot be used.
        """
        rows = self.open_rows()
        report = DropReport()
        examples = self._read(replace(rows, limit=_CHECKED), False, lambda medium: medium, report)
        fitting = drop_misfits(examples, input_spec, report)
        usable = drop_short(fitting, num_frames, report) if num_frames else fitting
        if not usable:
            reasons = [line[:_LONGEST] for line in report.lines()[:3]]
            told = "\n".join(reasons or ["they give no examples"])
            raise ValueError(
                f"recipe.data: none of the first {_CHECKED} rows of {rows.name!r} can be used as "
                f"{self.kind}:\n{told}"
            )
        return usable

    def _read(self, rows: Dataset, labelled: bool, keep: Keep, report: DropReport) -> list[Example]:
        """Return the examples of rows; add those that are dropped to `report`."""
        if self.kind == "pairs":
            return [*read_pairs(rows, self.dimensions, self.mixed_shapes, keep, report)]
        if self.kind == "samples":
            return [*read_samples(rows, self.dimensions, labelled, keep, report)]
        return [*_read_attributes(rows, self.kind == "captions", keep, report)]

    def check_conditioning(self, conditioning: PromptConditioning, policy: Policy) -> None:
        """Raise ValueError for a conditioning that does not fit the data.

        It must not name scores that no row has. Data of kind attributes or captions allows none,
        because its prompts already contain attributes. If the words depend on scores, the first
        rows are read; no image or video is decoded.
        """
        if self.kind in ("attributes", "captions"):
            remedy = "set conditioning to null, or kind to samples"
            raise ValueError(f"recipe.data.kind {self.kind} adds attributes itself: {remedy}")
        scored: list[str] = []
        if conditioning.dims:
            rows = itertools.islice(self.open_rows().iter_located(), _LOOKED_AT)
            scored = sorted({dim for _, record in rows for dim in record.ratings})
        conditioning.check(policy, dict.fromkeys(scored, 1.0))


def _skip_first(examples: Iterable[Example], count: int) -> Iterator[Example]:
    """Yield the examples without the first `count` pairs of each user."""
    seen = Counter[str]()
    for example in examples:
        user = example.user if isinstance(example, Pair) else None
        seen[user or ""] += 1
        if not user or seen[user] > count:
            yield example
