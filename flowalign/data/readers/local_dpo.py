"""Read Local-DPO data: a real video, a copy with regenerated regions, and their mask."""

from collections.abc import Sequence

from flowalign.data.media_record import Record
from flowalign.data.readers.fields import Fields
from flowalign.data.readers.preferences import read_pair_columns, read_safetensors_path
from flowalign.data.readers.schema import Schema, find_present
from flowalign.data.readers.stream_rows import RowProblem

_PROMPT = ("caption", "gen_caption", "prompt")
_POSITIVE = ("positive", "positive_video", "pos_video_path")
_NEGATIVE = ("negative", "negative_video", "neg_video_path")
_STRENGTH = ("strength", "yita")


def emphasis(strength: float) -> float:
    """Return 1 + (eta - 0.75) / 0.15, the weight of a region regenerated from noise level eta.

    Source: the code of Local-DPO, where eta is 0.75, 0.8 or 0.85.
    """
    return 1 + (strength - 0.75) / 0.15


def _record(rows: Sequence[Fields], default_id: str) -> Record:
    """Read a row; further columns become metadata, and the noise level becomes `strength`."""
    row = rows[0]
    strength = row.number(find_present(row, _STRENGTH))
    if strength is not None and not (emphasis(strength) > 0 and strength <= 1):
        raise RowProblem(f"strength is {strength:g}; it is a noise level above 0.6, at most 1")
    return Record(
        default_id,
        row.text(find_present(row, _PROMPT)),
        [
            row.medium(find_present(row, names), row.number("fps"))
            for names in (_POSITIVE, _NEGATIVE)
        ],
        ranks={"overall": [1.0, 2.0]},
        metadata=row.rest(*_PROMPT, *_POSITIVE, *_NEGATIVE, *_STRENGTH)
        | read_pair_columns(row)
        | {"mask": read_safetensors_path(row, "mask")}
        | ({} if strength is None else {"strength": strength}),
    )


LOCAL_DPO = Schema("local_dpo", (_POSITIVE, _NEGATIVE, ("mask",), _PROMPT), _record)
