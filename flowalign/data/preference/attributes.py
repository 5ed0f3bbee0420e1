"""Reads media with texts of good and bad attributes, for target-DPO and for its expert.

Source: CPO, arXiv:2601.04300, whose loss could not be read: a reconstruction. A medium is compared
with itself; its winner is to be matched to the expert's velocity for the prompt and the good
attributes, its loser to that for the bad ones.
"""

from collections.abc import Iterator

from flowalign.data.preference.convert import Keep
from flowalign.data.preference.dropped import DropReport
from flowalign.data.preference.pairs import Pair, Sample
from flowalign.data.readers import open_dataset
from flowalign.data.records import Record
from flowalign.media.media import Media
from flowalign.types import Dress, with_words

_NAMES = ("positive", "negative")


def read_attributes(
    path: str, schema: str, root: str | None, keep: Keep
) -> tuple[list[Pair], DropReport]:
    """Read a pair for each medium whose row has texts `positive` and `negative`; report the rest.

    Raises:
        ValueError: The dataset does not exist.
    """
    pairs, report = [], DropReport()
    for where, record in _with_attributes(path, schema, root, report):
        pairs += [_pair(record, keep(record.media[i]), where) for i in range(len(record.media))]
    return pairs, report


def read_captions(
    path: str, schema: str, root: str | None, keep: Keep
) -> tuple[list[Sample], DropReport]:
    """Read each such medium as a sample that is asked for by all its attributes, for an expert.

    Raises:
        ValueError: The dataset does not exist.
    """
    samples, report = [], DropReport()
    for _, record in _with_attributes(path, schema, root, report):
        references, dress = record.request().references, Dress(_told(record, *_NAMES))
        samples += [
            Sample(record.prompt, keep(m), references=references, dress=dress) for m in record.media
        ]
    return samples, report


def _with_attributes(
    path: str, schema: str, root: str | None, report: DropReport
) -> Iterator[tuple[str, Record]]:
    """Yield the rows that have both texts, with their places; report the others."""
    for where, record in open_dataset(path, schema, root).located():
        if record.problem:
            report.add(record.problem)
        elif not all(isinstance(record.metadata.get(name), str) for name in _NAMES):
            report.add("no texts positive and negative", where)
        else:
            yield where, record


def _pair(record: Record, medium: Media, where: str) -> Pair:
    asked = record.request()
    sample = Sample(record.prompt, medium, references=asked.references, mask=asked.mask)
    good, bad = (_told(record, name) for name in _NAMES)
    return Pair(sample, sample, "attributes", targets=(good, bad), where=where)


def _told(record: Record, *names: str) -> str:
    """Return the prompt of a row with its texts of these attributes behind it."""
    words = [record.metadata[name] for name in names]
    return with_words("{prompt}, {words}", record.prompt, words, ", ")
