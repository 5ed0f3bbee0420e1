"""From the records of any preference dataset to pairs, or to single samples, to train on."""

import difflib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from flowalign.data.preference.dropped import Tally
from flowalign.data.preference.pairs import Pair, Sample, Segment
from flowalign.data.preference.validate import Inspection
from flowalign.data.readers import Dataset, open_dataset
from flowalign.data.readers.dense_dpo import DENSE_DPO
from flowalign.data.readers.kto import KTO
from flowalign.data.readers.local_dpo import LOCAL_DPO, emphasis
from flowalign.data.readers.preferences import CHOSEN_REJECTED
from flowalign.data.records import Record
from flowalign.media.media import Media

Said = Mapping[str, Sequence[float]]
"""By dimension, a number for each medium of a record; higher is better."""
Keep = Callable[[Media], Media]
"""What is kept of a medium that is used; called once its bytes have been looked at."""
_MADE_TO_TRAIN = (CHOSEN_REJECTED.name, LOCAL_DPO.name, DENSE_DPO.name)
"""Their rows say which one was chosen, and may hold what a pair has beside its media."""


def read_pairs(
    path: str,
    schema: str = "auto",
    root: str | None = None,
    dimensions: Sequence[str] = (),
    mixed_shapes: bool = False,
    keep: Keep = lambda medium: medium,
) -> tuple[list[Pair], Tally]:
    """All pairs of a dataset that can be used, and what cannot.

    Any two media of a record that people told apart are a pair, in each of the named dimensions; of
    votes, ranks and ratings the first decides. With no name, all in which people compared, or else
    rated. Ties, equal media, pairs that contradict their own scores, and repeated ones are dropped;
    so are media of different sizes or numbers of frames, unless `mixed_shapes`. Bytes of media that
    the dataset holds stay in memory unless `keep` drops them.

    Raises:
        ValueError: there is no such dataset, or no such dimension in it.
    """
    dataset = open_dataset(path, schema, root)
    tally, inspection, known = Tally(), Inspection(), set()
    pairs: dict[bytes, Pair] = {}
    for where, record in _usable(dataset, tally):
        said = _said(record, dataset.schema.name)
        known |= said.keys()
        for pair in _pairs(record, _asked(said, record, dimensions), where, tally):
            if dataset.schema.name in _MADE_TO_TRAIN:
                pair = _with_notes(pair, record, dataset.schema.name)
            if problem := _problem(pair, inspection, mixed_shapes):
                tally.add(problem, where)
            elif (key := _pair_key(pair, inspection)) in pairs:
                tally.add("repeated pair", where)
            else:
                chosen, rejected = (_kept(side, keep) for side in (pair.chosen, pair.rejected))
                pairs[key] = replace(pair, chosen=chosen, rejected=rejected)
    _check_dimensions(path, dimensions, known)
    return list(pairs.values()), tally


def read_samples(
    path: str,
    schema: str = "auto",
    root: str | None = None,
    dimensions: Sequence[str] = (),
    labelled: bool = False,
    keep: Keep = lambda medium: medium,
) -> tuple[list[Sample], Tally]:
    """All single media of a dataset that can be used, and what cannot.

    A thumb up is desirable. Of media that were compared, one that ever won is, one that only ever
    lost is not, and of others nobody knows, whom `labelled` leaves out; such a medium is one
    sample, however often it was compared.

    Raises:
        ValueError: there is no such dataset, or no such dimension in it.
    """
    dataset = open_dataset(path, schema, root)
    tally, inspection, known = Tally(), Inspection(), set()
    samples: dict[bytes, Sample] = {}
    for where, record in _usable(dataset, tally):
        said = _said(record, dataset.schema.name)
        known |= said.keys()
        for sample in _samples(record, _asked(said, record, dimensions)):
            problem = _unlabelled(record, dataset.schema.name) or inspection.of_one(sample.media)
            key = b"" if problem else _key(sample, inspection, len(record.media) == 1)
            if problem or (key in samples and len(record.media) == 1):
                tally.add(problem or "repeated medium", where)
            else:
                earlier = samples[key] if key in samples else _kept(sample, keep)
                samples[key] = _better_known(earlier, sample)
    _check_dimensions(path, dimensions, known)
    found = list(samples.values())
    return _judged(found, tally) if labelled else found, tally


def _judged(samples: Sequence[Sample], tally: Tally) -> list[Sample]:
    """Those with a label."""
    for sample in samples:
        if sample.desirable is None:
            tally.add("neither liked nor disliked", sample.media.path or sample.prompt)
    return [sample for sample in samples if sample.desirable is not None]


def _kept(sample: Sample, keep: Keep) -> Sample:
    return replace(sample, media=keep(sample.media))


def _usable(dataset: Dataset, tally: Tally) -> Iterator[tuple[str, Record]]:
    for where, record in dataset.located():
        if record.problem:
            tally.add(record.problem)  # which names the row
        elif problem := _contradiction(record, dataset.schema.name):
            tally.add(problem, where)
        else:
            yield where, record


def _contradiction(record: Record, schema: str) -> str:
    """Why a row that names the better medium denies it by its own scores."""
    for dim in record.ranks if schema in _MADE_TO_TRAIN else ():
        chosen, rejected = record.ratings.get(dim, (0.0, 0.0))
        if chosen < rejected:
            return f"the rejected one has the higher score: {dim} {chosen:g} < {rejected:g}"
    return ""


def _said(record: Record, schema: str) -> Said:
    ranks = {dim: [-rank for rank in ranks] for dim, ranks in record.ranks.items()}
    return ranks if schema in _MADE_TO_TRAIN else {**record.ratings, **ranks, **record.votes}


def _asked(said: Said, record: Record, dimensions: Sequence[str]) -> Said:
    compared = [dim for dim in said if dim in record.ranks or dim in record.votes]
    return {dim: said[dim] for dim in dimensions or compared or said if dim in said}


def _pairs(record: Record, said: Said, where: str, tally: Tally) -> Iterator[Pair]:
    """Every two media that differ in a dimension."""
    if len(record.media) < 2:
        tally.add("single medium", where)
    elif not said:
        tally.add("no answer", where)
    else:
        samples = [_sample(record, i) for i in range(len(record.media))]
        for dim, values in said.items():
            for i, j in itertools.combinations(range(len(samples)), 2):
                if values[i] == values[j]:
                    tally.add(f"tie: {dim}", where)
                else:
                    i, j = (i, j) if values[i] > values[j] else (j, i)
                    gap = values[i] - values[j]
                    user = samples[i].user
                    yield Pair(samples[i], samples[j], dim, gap, user=user, where=where)


def _with_notes(pair: Pair, record: Record, schema: str) -> Pair:
    """With what the row says of the pair; the gap is that of the scores where it does not say."""
    notes, dim = record.metadata, pair.dimension
    gap = notes.get("gap")
    if gap is None and dim in pair.chosen.scores:
        gap = pair.chosen.scores[dim] - pair.rejected.scores[dim]
    regenerated = schema == LOCAL_DPO.name and "strength" in notes
    strength = emphasis(notes["strength"]) if regenerated else 1.0
    return replace(
        pair, gap=gap, weight=notes.get("weight", 1.0), stage=notes.get("stage", 0),
        segments=[Segment(**segment) for segment in notes.get("segments", ())],
        mask=notes.get("mask"), mask_strength=strength,
        chosen=replace(pair.chosen, weight_map=notes.get("weight_map_chosen")),
        rejected=replace(pair.rejected, weight_map=notes.get("weight_map_rejected")),
    )  # fmt: skip


def _samples(record: Record, said: Said) -> Iterator[Sample]:
    """The first dimension decides which media won and which lost."""
    values = next(iter(said.values())) if len(record.media) > 1 and said else ()
    for i in range(len(record.media)):
        sample = _sample(record, i)
        if not values:
            yield sample
        else:
            won, lost = values[i] > min(values), values[i] < max(values)
            yield replace(sample, desirable=won or (False if lost else None))


def _better_known(earlier: Sample, later: Sample) -> Sample:
    """Whoever ever won is desirable, whatever came before or after."""
    if later.desirable or earlier.desirable is None:
        return replace(earlier, desirable=later.desirable)
    return earlier


def _sample(record: Record, i: int) -> Sample:
    """Ranks and votes are no scores: they mean nothing outside their record."""
    scores = {dim: float(values[i]) for dim, values in record.ratings.items()}
    return Sample(
        record.prompt, record.media[i], scores, record.metadata.get("desirable"),
        _user(record.metadata), record.metadata.get("weight_map"),
    )  # fmt: skip


def _user(metadata: Mapping[str, Any]) -> str:
    user = metadata.get("user_id", "")
    return str(user) if isinstance(user, str | int) else ""


def _unlabelled(record: Record, schema: str) -> str:
    if schema != KTO.name or "desirable" in record.metadata:
        return ""
    return f"no label: {record.metadata.get('label')!r} is none of 0, 1, true and false"


def _problem(pair: Pair, inspection: Inspection, mixed_shapes: bool) -> str:
    if pair.gap is not None and pair.gap <= 0:
        return f"{'negative gap' if pair.gap else 'tie'}: {pair.dimension} {pair.gap:g}"
    files = (pair.mask, pair.chosen.weight_map, pair.rejected.weight_map)
    missing = inspection.missing(*(file for file in files if file))
    return missing or inspection.of_pair(pair.chosen.media, pair.rejected.media, mixed_shapes)


def _pair_key(pair: Pair, inspection: Inspection) -> bytes:
    """Equal where prompt, media, dimension and person are."""
    sides = [_key(side, inspection) for side in (pair.chosen, pair.rejected)]
    return _hashed(*sides, pair.dimension.encode(), pair.user.encode())


def _key(sample: Sample, inspection: Inspection, judged_alone: bool = False) -> bytes:
    """Equal where prompt and medium are; of a medium judged alone, person and label too."""
    path = sample.media.path
    medium = path.encode() if path else inspection.digest(sample.media)
    judgement = f"{sample.user} {sample.desirable}" if judged_alone else ""
    return _hashed(sample.prompt.encode(), medium, judgement.encode())


def _hashed(*parts: bytes) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8) + part)
    return found.digest()


def _check_dimensions(path: str, asked: Sequence[str], known: Set[str]) -> None:
    for name in asked:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            there = ", ".join(sorted(known)) or "none"
            raise ValueError(f"{path} has no dimension {name!r}{hint}\nthere are {there}")
