"""Read the Human Preference Datasets, versions 2 and 3."""

from collections.abc import Sequence

from flowalign.data.media_record import Record
from flowalign.data.readers.fields import Fields, normalise_votes, rank_values
from flowalign.data.readers.schema import Schema
from flowalign.data.readers.stream_rows import RowProblem


def _v2_train(rows: Sequence[Fields], default_id: str) -> Record:
    """Read the training set; a 1 in `human_preference` marks the preferred image."""
    row, media = rows[0], rows[0].media("file_path")
    preferred = row.numbers("human_preference", len(media))
    ranks = {"overall": rank_values(-mark for mark in preferred)} if preferred else {}
    rest = row.rest("prompt", "file_path", "human_preference")
    return Record(default_id, row.text("prompt"), media, ranks=ranks, metadata=rest)


def _v2_test(rows: Sequence[Fields], default_id: str) -> Record:
    """Read the test set; `rank` is the mean rank over annotators, and the lowest is best."""
    row, media = rows[0], rows[0].media("image_path")
    means = row.numbers("rank", len(media))
    ranks = {"overall": rank_values(means)} if means else {}
    rest = row.rest("prompt", "image_path")
    return Record(default_id, row.text("prompt"), media, ranks=ranks, metadata=rest)


def _v3(rows: Sequence[Fields], default_id: str) -> Record:
    """Read HPDv3: `path1` is preferred; `choice_dist` has the votes for `path1`, then `path2`."""
    row = rows[0]
    counts = row.numbers("choice_dist", 2)
    if counts and counts[0] < counts[1]:
        raise RowProblem(f"choice_dist {counts} prefers path2, but path1 is the preferred one")
    votes = {"overall": normalise_votes(counts, "choice_dist")} if counts else {}
    return Record(
        default_id,
        row.text("prompt"),
        [row.medium("path1"), row.medium("path2")],
        ranks={"overall": [1.0, 2.0]},
        votes=votes,
        metadata=row.rest("prompt", "path1", "path2", "choice_dist"),
    )


HPD_V2_TRAIN = Schema("hpd_v2_train", (("human_preference",), ("file_path",)), _v2_train)
HPD_V2_TEST = Schema("hpd_v2_test", (("image_path",), ("rank",), ("raw_annotations",)), _v2_test)
HPD_V3 = Schema("hpd_v3", (("path1",), ("path2",), ("prompt",)), _v3)
