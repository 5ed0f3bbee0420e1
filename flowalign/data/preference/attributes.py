"""Read media with texts of good and bad attributes, for target-DPO and for its expert.

Source: CPO, arXiv:2601.04300; a reconstruction, because we could not access the loss. An image or
video is paired with itself. The target of the winner is the expert's velocity for the prompt with
the good attributes, the target of the loser the velocity for the prompt with the bad attributes.
"""

from collections.abc import Iterator

from flowalign.data.media.media import Media
from flowalign.data.media_record import Record
from flowalign.data.preference.dropped import DropReport
from flowalign.data.preference.preference_data import Keep, Pair, Sample
from flowalign.data.readers import Dataset
from flowalign.types import ConditionedPrompt, insert_words

_NAMES = ("positive", "negative")


def read_attributes(dataset: Dataset, keep: Keep, report: DropReport) -> Iterator[Pair]:
    """Yield a pair per image or video of the rows with texts `positive` and `negative`.

    Rows without both texts are added to `report`.
    """
    for where, record in _add_attributes(dataset, report):
        yield from (_make_pair(record, keep(medium), where) for medium in record.media)


def read_captions(dataset: Dataset, keep: Keep, report: DropReport) -> Iterator[Sample]:
    """Yield the same images or videos as samples with all attributes in the prompt, for an expert.

    Rows without both texts are added to `report`.
    """
    for _, record in _add_attributes(dataset, report):
        references = record.request().references
        conditioned = ConditionedPrompt(_find_text(record, *_NAMES))
        for medium in record.media:
            yield Sample(
                record.prompt, keep(medium), references=references, conditioned=conditioned
            )


def _add_attributes(dataset: Dataset, report: DropReport) -> Iterator[tuple[str, Record]]:
    """Yield the location and the record of each row with both texts; report the remaining rows."""
    for where, record in dataset.iter_located():
        if record.problem:
            report.add(record.problem)
        elif not all(isinstance(record.metadata.get(name), str) for name in _NAMES):
            report.add("missing texts positive and negative", where)
        else:
            yield where, record


def _make_pair(record: Record, medium: Media, where: str) -> Pair:
    asked = record.request()
    sample = Sample(record.prompt, medium, references=asked.references, mask=asked.mask)
    good, bad = (_find_text(record, name) for name in _NAMES)
    return Pair(sample, sample, "attributes", targets=(good, bad), where=where)


def _find_text(record: Record, *names: str) -> str:
    """Return the prompt of a row, followed by the texts in its columns `names`."""
    words = [record.metadata[name] for name in names]
    return insert_words("{prompt}, {words}", record.prompt, words, ", ")
