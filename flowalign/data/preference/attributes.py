"""Reads media with texts of good and bad attributes, for target-DPO and for its expert.

Source: CPO, arXiv:2601.04300, whose loss could not be read: a reconstruction. A medium is compared
with itself; its winner is to be matched to the expert's velocity for the prompt and the good
attributes, its loser to that for the bad ones.
"""

from collections.abc import Iterator

from flowalign.data.media.media import Media
from flowalign.data.media_record import Record
from flowalign.data.preference.dropped import DropReport
from flowalign.data.preference.pairs import Keep, Pair, Sample
from flowalign.data.readers import Dataset
from flowalign.types import ConditionedPrompt, insert_words

_NAMES = ("positive", "negative")


def read_attributes(dataset: Dataset, keep: Keep, report: DropReport) -> Iterator[Pair]:
    """Yield a pair for each medium whose row has texts `positive` and `negative`; report others."""
    for where, record in _add_attributes(dataset, report):
        yield from (_make_pair(record, keep(medium), where) for medium in record.media)


def read_captions(dataset: Dataset, keep: Keep, report: DropReport) -> Iterator[Sample]:
    """Yield each such medium as a sample that is asked for by all its attributes, for an expert."""
    for _, record in _add_attributes(dataset, report):
        references = record.request().references
        conditioned = ConditionedPrompt(_find_text(record, *_NAMES))
        for medium in record.media:
            yield Sample(
                record.prompt, keep(medium), references=references, conditioned=conditioned
            )


def _add_attributes(dataset: Dataset, report: DropReport) -> Iterator[tuple[str, Record]]:
    """Yield the rows that have both texts, with their places; report the others."""
    for where, record in dataset.iter_located():
        if record.problem:
            report.add(record.problem)
        elif not all(isinstance(record.metadata.get(name), str) for name in _NAMES):
            report.add("no texts positive and negative", where)
        else:
            yield where, record


def _make_pair(record: Record, medium: Media, where: str) -> Pair:
    asked = record.request()
    sample = Sample(record.prompt, medium, references=asked.references, mask=asked.mask)
    good, bad = (_find_text(record, name) for name in _NAMES)
    return Pair(sample, sample, "attributes", targets=(good, bad), where=where)


def _find_text(record: Record, *names: str) -> str:
    """Return the prompt of a row with its texts of these attributes behind it."""
    words = [record.metadata[name] for name in names]
    return insert_words("{prompt}, {words}", record.prompt, words, ", ")
