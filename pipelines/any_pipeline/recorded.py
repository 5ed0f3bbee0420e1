"""Records the results of a pipeline's encoding methods, one row per request, for replay."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from flowalign.types import Cond

STATE = "prepare_latents"
"""Method of every pipeline that returns the initial state as its first result."""
Calls = Sequence[tuple[str, Any]]
"""Names and results of the methods that a pipeline called, in order."""


@dataclass(frozen=True)
class Leaf:
    """Dependence of one recorded tensor on the requests of a call."""

    kind: Literal["state", "rows", "listed", "lone", "shared"]
    """Kind of the tensor. `state`: the initial state. `rows`: one row per request. `listed`: a list
    with one tensor per request. `lone`: a single row, so the call can have only one request.
    `shared`: the same for all requests."""
    axis: int | None = None
    """Axis that has a prompt-dependent length, in a row with batch axis; None if there is none."""
    value: Any = None
    """Value of a `shared` leaf."""


@dataclass(frozen=True)
class Layout:
    """Maps the results of a pipeline's methods to `Cond`, and back.

    Texts of different lengths are padded only for storage. The network receives them unpadded, as
    the pipeline made them, so a call takes only requests of equal lengths.
    """

    names: tuple[str, ...]
    """Names of methods in the order of their calls."""
    spec: TreeSpec
    leaves: tuple[Leaf, ...]
    longest: int
    """Length to which texts are padded, in tokens."""

    @classmethod
    def of(cls, short: Calls, long: Calls, both: Calls, longest: int) -> "Layout":
        """Find the layout from recordings of a short prompt, a longer one, and that one twice.

        If requests have images, the images of the short and the longer prompt must differ. For a
        pipeline that takes one request per call, `both` is a second recording of the longer prompt.

        Raises:
            ValueError: The results cannot be attributed to single requests.
        """
        (first, spec), (second, other), (third, _) = (_flatten(one) for one in (short, long, both))
        names = tuple(name for name, _ in short)
        if spec != other or len(first) != len(third) or STATE not in names:
            raise ValueError(
                "its methods return results of different structure for different prompts"
            )
        state = len(_flatten(short[: names.index(STATE)])[0])
        kinds = [
            Leaf("state") if k == state else _leaf(*results)
            for k, results in enumerate(zip(first, second, third, strict=True))
        ]
        return cls(names, spec, tuple(kinds), longest)

    @property
    def ragged(self) -> bool:
        """Whether text lengths depend on the prompt, so that requests are encoded one by one."""
        return any(leaf.axis is not None for leaf in self.leaves)

    def kept(self, recordings: Sequence[Calls]) -> Cond:
        """Return the request-dependent results as conditions, one row per request.

        Raises:
            ValueError: A text is longer than `longest`.
        """
        results = [_flatten(calls)[0] for calls in recordings]
        cond = {}
        for k, leaf in enumerate(self.leaves):
            if leaf.kind in ("state", "shared"):
                continue
            found = [torch.stack(one[k]) if leaf.kind == "listed" else one[k] for one in results]
            if leaf.axis is not None:
                lengths = [one.shape[leaf.axis] for one in found]
                cond[f"{k}.length"] = torch.tensor(lengths, device=found[0].device)
                found = [self._padded(one, leaf.axis) for one in found]
            cond[str(k)] = torch.cat(found)
        return cond

    def lengths(self, cond: Cond) -> Int[Tensor, "n texts"] | None:
        """Return the text lengths of each request; None if all requests can share a call.

        If requests cannot share a call, a column of distinct numbers separates them.
        """
        found = [value for name, value in cond.items() if name.endswith(".length")]
        lone = [cond[str(k)] for k, leaf in enumerate(self.leaves) if leaf.kind == "lone"]
        found += [torch.arange(len(rows), device=rows.device) for rows in lone]
        return torch.stack(found, 1) if found else None

    def returned(self, cond: Cond, x: Tensor) -> list[tuple[str, Any]]:
        """Return the methods' results for requests of equal lengths, with x as the state."""
        flat = [self._given(k, leaf, cond, x) for k, leaf in enumerate(self.leaves)]
        return list(zip(self.names, tree_unflatten(flat, self.spec), strict=True))

    def _given(self, k: int, leaf: Leaf, cond: Cond, x: Tensor) -> Any:
        if leaf.kind in ("state", "shared"):
            return x if leaf.kind == "state" else leaf.value
        rows = cond[str(k)]
        if leaf.axis is not None:
            rows = rows.narrow(leaf.axis, 0, int(cond[f"{k}.length"][0]))
        return list(rows.unbind(0)) if leaf.kind == "listed" else rows

    def _padded(self, row: Tensor, axis: int) -> Tensor:
        missing = self.longest - row.shape[axis]
        if missing < 0:
            raise ValueError(
                f"a prompt has {row.shape[axis]} tokens; call.arguments.max_sequence_length is "
                f"{self.longest}"
            )
        return pad(row, [0, 0] * (row.ndim - 1 - axis) + [0, missing])


def _flatten(calls: Calls) -> tuple[list[Any], TreeSpec]:
    results = tuple(result for _, result in calls)
    return tree_flatten(results, is_leaf=lambda one: isinstance(one, list))


def _leaf(short: Any, long: Any, both: Any) -> Leaf:
    if isinstance(short, list) and [len(one) for one in (short, long, both)] == [1, 1, 2]:
        return Leaf("listed", _ragged_axis(short[0][None], long[0][None]))
    if isinstance(short, list):
        pairs = [p for p in zip(short, long, strict=False) if isinstance(p[0], Tensor)]
        if not all(torch.equal(one, other) for one, other in pairs):
            raise ValueError("a list of results does not hold one tensor per request")
    if not isinstance(short, Tensor):
        return Leaf("shared", value=short)
    if both.shape[:1] == (2 * long.shape[0],) and both.shape[1:] == long.shape[1:]:
        return Leaf("rows", _ragged_axis(short, long))
    if long.shape == both.shape and torch.equal(short, long):
        return Leaf("shared", value=short)
    if long.shape != both.shape or long.shape[:1] != (1,):
        raise ValueError(f"{tuple(long.shape)} for one request is {tuple(both.shape)} for two")
    return Leaf("lone", _ragged_axis(short, long))


def _ragged_axis(short: Tensor, long: Tensor) -> int | None:
    """Return the axis with a prompt-dependent length."""
    differ = [k for k in range(short.ndim) if short.shape[k] != long.shape[k]]
    if len(differ) > 1:
        raise ValueError(f"{len(differ)} axes of a text depend on the prompt; at most 1 may")
    return differ[0] if differ else None


def group_calls(num_rows: int, sigma: Tensor, lengths: Tensor | None) -> list[tuple[Any, Tensor]]:
    """Return groups of rows that share a time and text lengths, each with its time."""
    if sigma.numel() == 1 and lengths is None:
        return [(slice(None), sigma)]
    times = sigma.expand(num_rows)
    columns = [times[:, None].double()]
    columns += [] if lengths is None else [lengths.double()]
    _, group = torch.unique(torch.cat(columns, 1), dim=0, return_inverse=True)
    rows = [(group == k).nonzero().flatten() for k in range(int(group.max()) + 1)]
    return [(some, times[some[0]]) for some in rows]
