"""Records of preference datasets as one table of samples, candidates and labels."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.data.records import Record
from flowalign.reward_training.embeddings import Sample
from flowalign.reward_training.losses import LabelKind

Part = Literal["train", "held_out", "test"]
PARTS: tuple[Part, ...] = ("train", "held_out", "test")


@dataclass(frozen=True)
class Preferences:
    """B records with up to m candidates each, and what people said in R dimensions."""

    samples: Sequence[Sample]
    """Every candidate of every record, one after the other."""
    candidate: Int[Tensor, "B m"]
    """Its row in `samples`; -1 where a record has fewer."""
    labels: Float[Tensor, "B m R"]
    """NaN where there is none."""
    part: Int[Tensor, "B"]
    """Index into PARTS; records with the same prompt are in the same part."""
    num_unlabelled: int = 0
    """Records without a label in any of the dimensions; left out."""
    problems: Sequence[str] = ()
    """Of records that could not be read; left out."""

    def rows(self, part: Part) -> Int[Tensor, "n"]:
        """The records of a part."""
        return (self.part == PARTS.index(part)).nonzero().flatten()

    def fingerprint(self) -> str:
        """A hash of all prompts and labels and of where they went, not of the media."""
        digest = hashlib.sha256()
        for sample in self.samples:
            digest.update(sample.prompt.encode() + b"\0")
        for table in (self.candidate, self.labels.nan_to_num(-12345.0), self.part):
            digest.update(table.numpy().tobytes())
        return digest.hexdigest()[:16]

    def without(self, failed: Iterable[int]) -> "Preferences":
        """The same, with no label for the candidates in these rows of `samples`."""
        gone = torch.isin(self.candidate, torch.tensor(sorted(failed), dtype=torch.long))
        labels = self.labels.masked_fill(gone[..., None], torch.nan)
        return Preferences(
            self.samples, self.candidate, labels, self.part, self.num_unlabelled, self.problems
        )


def gather(
    records: Iterable[Record],
    kinds: Mapping[str, LabelKind],
    seed: int,
    shares: tuple[float, float],
) -> Preferences:
    """The table of all records that say something about one of the dimensions.

    `shares` of the prompts are held out, and kept for the test.

    Raises:
        ValueError: a dimension has no label at all, or there are too few prompts to divide.
    """
    kept: list[Record] = []
    problems: list[str] = []
    unlabelled = 0
    for record in records:
        if record.problem:
            problems.append(record.problem)
        elif any(_said(record, dim, kind) for dim, kind in kinds.items()):
            kept.append(record)
        else:
            unlabelled += 1
    if not kept:
        wanted = ", ".join(f"{kind} of {dim}" for dim, kind in kinds.items())
        raise ValueError(f"no record of the data has {wanted}")
    widest = max(len(r.media) for r in kept)
    candidate = torch.full((len(kept), widest), -1)
    labels = torch.full((len(kept), widest, len(kinds)), torch.nan)
    samples: list[Sample] = []
    for i, record in enumerate(kept):
        m = len(record.media)
        candidate[i, :m] = torch.arange(len(samples), len(samples) + m)
        samples += [Sample(medium, record.prompt) for medium in record.media]
        for d, (dim, kind) in enumerate(kinds.items()):
            if said := _said(record, dim, kind):
                labels[i, :m, d] = torch.tensor(said, dtype=torch.float32)
    _check(labels, kinds, kept)
    part = _parts([r.prompt for r in kept], seed, shares)
    return Preferences(samples, candidate, labels, part, unlabelled, problems)


def _said(record: Record, dim: str, kind: LabelKind) -> Sequence[float]:
    """Ranks, votes or ratings of a dimension; a comparison needs two candidates."""
    said = _tables(record)[kind].get(dim, ())
    return said if kind == "ratings" or len(said) > 1 else ()


def _tables(record: Record) -> dict[LabelKind, Mapping[str, Sequence[float]]]:
    return {"ranks": record.ranks, "votes": record.votes, "ratings": record.ratings}


def _check(
    labels: Float[Tensor, "B m R"], kinds: Mapping[str, LabelKind], records: Sequence[Record]
) -> None:
    given = labels.isfinite().flatten(0, 1).any(0)
    for (dim, kind), some in zip(kinds.items(), given.tolist(), strict=True):
        if not some:
            named = sorted({name for record in records for name in _tables(record)[kind]})
            raise ValueError(
                f"no record has {kind} of {dim!r}; the data have {kind} of {named or 'nothing'}"
            )


def _parts(prompts: Sequence[str], seed: int, shares: tuple[float, float]) -> Int[Tensor, "B"]:
    """Part of each record, by its prompt: the same prompt, whatever its case, is never in two."""
    plain = [" ".join(p.casefold().split()) for p in prompts]
    order = sorted(set(plain), key=lambda p: hashlib.sha256(f"{seed}:{p}".encode()).digest())
    sizes = [max(round(share * len(order)), 1) if share else 0 for share in shares]
    if sum(sizes) >= len(order) or not sizes[0]:
        raise ValueError(
            f"{len(order)} prompts cannot be divided into shares of {shares[0]:g} held out, "
            f"{shares[1]:g} for the test, and a rest to train on"
        )
    held, test = set(order[: sizes[0]]), set(order[sizes[0] : sum(sizes)])
    return torch.tensor([1 if p in held else 2 if p in test else 0 for p in plain])
