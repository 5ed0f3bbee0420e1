"""Local-DPO: a real video, a copy of it that was corrupted in some places, and where."""

from collections.abc import Sequence

from flowalign.data.readers.fields import Fields
from flowalign.data.readers.preferences import notes, safetensors
from flowalign.data.readers.rows import RowProblem
from flowalign.data.readers.schema import Schema, present
from flowalign.data.records import Record

_PROMPT = ("caption", "gen_caption", "prompt")
_POSITIVE = ("positive", "positive_video", "pos_video_path")
_NEGATIVE = ("negative", "negative_video", "neg_video_path")
_STRENGTH = ("strength", "yita")


def emphasis(strength: float) -> float:
    """1 + (eta - 0.75) / 0.15, what a region that was regenerated from noise level eta counts.

    Source: Local-DPO's code, whose eta is 0.75, 0.8 or 0.85.
    """
    return 1 + (strength - 0.75) / 0.15


def _record(rows: Sequence[Fields], default_id: str) -> Record:
    """What a pair may have beside its media is in the metadata, the noise level as `strength`."""
    row = rows[0]
    strength = row.number(present(row, _STRENGTH))
    if strength is not None and not (emphasis(strength) > 0 and strength <= 1):
        raise RowProblem(f"strength is {strength:g}; it is a noise level above 0.6, at most 1")
    return Record(
        default_id, row.text(present(row, _PROMPT)),
        [row.medium(present(row, names), row.number("fps")) for names in (_POSITIVE, _NEGATIVE)],
        ranks={"overall": [1.0, 2.0]},
        metadata=row.rest(*_PROMPT, *_POSITIVE, *_NEGATIVE, *_STRENGTH)
        | notes(row) | {"mask": safetensors(row, "mask")}
        | ({} if strength is None else {"strength": strength}),
    )  # fmt: skip


LOCAL_DPO = Schema("local_dpo", (_POSITIVE, _NEGATIVE, ("mask",), _PROMPT), _record)
