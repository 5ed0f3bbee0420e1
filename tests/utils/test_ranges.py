"""Ranges of numbers: their bounds, detected violations, and that every number has one."""

import contextlib
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from flowalign.utils.ranges import (
    Component,
    Decay,
    FiniteFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    UnitInterval,
    find_errors,
    get_annotations,
    require_ranges,
)
from tests.fixtures.components import components, parts

NEVER = [math.nan, math.inf, -math.inf, 1e39, -1e39, 10**40, -(10**40)]
"""Numbers that no setting may have."""


@dataclass(frozen=True)
class Inner:
    """Class with a number."""

    rate: UnitInterval = 0.5


@dataclass(frozen=True)
class Other(Inner):
    """Has another range."""

    rate: PositiveFloat = 2.0


@dataclass(frozen=True)
class Outer:
    """Has numbers in every place where a run file can have them."""

    count: PositiveInt = 1
    either: NonNegativeInt | list[Decay] | None = None
    pair: tuple[Decay, PositiveFloat] = (0.5, 2.0)
    weights: Mapping[str, FiniteFloat] = field(default_factory=dict)
    several: Sequence[PositiveInt] = ()
    inner: Inner = field(default_factory=Inner)
    many: Sequence[Inner] = ()
    bare: float = 1.0
    word: str | PositiveInt = "none"
    on: bool = False


def found(**settings: object) -> dict[str, str]:
    return dict(find_errors(settings, Outer))


@pytest.mark.parametrize(
    ("allowed", "inside", "outside"),
    [
        (Range(least=1, most=3), [1, 3], [0, 4]),
        (Range(above=0, below=0.5), [0.25], [0, 0.5]),
        (Range(above=-1), [-0.5, 1e38], [-1, -2]),
        (Range(), [0, -1e38], []),
    ],
)
def test_bounds_belong_to_a_range_or_not_and_nothing_infinite_does(allowed, inside, outside):
    assert all(value in allowed for value in inside)
    assert not any(value in allowed for value in [*outside, *NEVER])


def test_a_message_names_the_number_and_its_bounds_and_technical_ones_to_who_crossed_them():
    assert found(count=0) == {"count": "0; it must be at least 1"}
    assert found(count=2**31) == {
        "count": "2147483648; it must be at least 1 and at most 2147483647"
    }
    assert found(bare=math.nan) == {"bare": "nan; it must be a finite float32 number"}
    assert found(pair=(1.0, 0)) == {
        "pair.0": "1.0; it must be at least 0 and below 1",
        "pair.1": "0; it must be above 0",
    }
    assert found(count=10**30) == {
        "count": "a number of 31 digits; it must be at least 1 and at most 2147483647"
    }


def test_a_number_is_held_against_the_range_of_its_own_place():
    assert found(either=-1, weights={"a": 1.0, "b": math.inf}, several=[2, 0]).keys() == {
        "either",
        "weights.b",
        "several.1",
    }
    assert found(either=[0.5, 1.0]).keys() == {"either.1"}
    assert found(either=None, word="five", on=True, several=[3]) == {}
    assert found(word=0).keys() == {"word"}


def test_null_is_taken_where_a_type_or_a_default_allows_it_and_refused_with_what_is_allowed():
    assert found(either=None) == {}
    assert found(count=None) == {"count": "null; it must be at least 1"}
    assert found(word=None) == {"word": "null; it must be a text or at least 1"}
    assert found(several=[1, None]) == {"several.1": "null; it must be at least 1"}
    assert found(pair=None, weights=None, on=None, inner=None) == {
        "pair": "null; it must be a list",
        "weights": "null; it must be a mapping",
        "on": "null; it must be true or false",
        "inner": "null; it must be a mapping of settings: rate",
    }
    assert found(unknown=None) == {}


def test_numbers_of_components_are_those_of_the_class_that_is_named():
    path = f"{Other.__module__}.Other"
    assert found(inner={"rate": 2.0}).keys() == {"inner.rate"}
    assert found(inner={"class_path": path, "init_args": {"rate": 2.0}}) == {}
    below = {"class_path": path, "init_args": {"rate": 0.0}}
    assert found(inner=below).keys() == {"inner.rate"}
    assert found(many=[{"rate": 0.1}, below]).keys() == {"many.1.rate"}


def test_an_object_made_in_python_is_refused_alike():
    with pytest.raises(ValueError, match=r"^outer\.count is 0; it must be at least 1$"):
        require_ranges(Outer(count=0), "outer")
    require_ranges(Outer(inner=Other()), "outer")


def holding(annotation: Any, value: float) -> Any:
    """A value of this annotation with the number where it takes numbers, or None without any."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated or annotation in (int, float):
        return value
    if origin in (dict, Mapping):
        return {"a": holding(inside[1], value)} if holding(inside[1], value) is not None else None
    if origin is tuple:
        held = tuple(holding(member, value) for member in inside if member is not ...)
        return None if None in held else held
    if origin in (list, Sequence):
        return [holding(inside[0], value)] if holding(inside[0], value) is not None else None
    held = [holding(member, value) for member in inside]
    return next((one for one in held if one is not None), None)


@pytest.mark.slow
def test_every_number_of_a_run_file_says_its_range():
    """A new setting without one fails here; ids are not numbers that anyone sets."""
    for cls in components():
        for name, annotation in get_annotations(cls).items():
            bare = [part for part in parts(annotation) if part in (int, float)]
            ranged = [part for part in parts(annotation) if get_origin(part) is Annotated]
            assert len(bare) == len(ranged), f"{cls.__name__}.{name}: {annotation} has no range"


@pytest.mark.slow
@pytest.mark.parametrize("value", NEVER)
def test_no_component_takes_a_number_that_is_not_one(value):
    tried = 0
    for cls in components():
        for name, annotation in get_annotations(cls).items():
            given = holding(annotation, value)
            if given is not None:
                tried += 1
                wrong = [key for key, _ in find_errors({name: given}, cls)]
                assert wrong, (cls, name)
                assert wrong[0].startswith(name), (cls, name)
    assert tried > 200


def ends(annotation: Any) -> list[Any]:
    """The numbers at the ends of the ranges of an annotation, in the form that it wants."""
    found = []
    for part in parts(annotation):
        if get_origin(part) is Annotated:
            kind, (allowed,) = get_args(part)[0], part.__metadata__
            bounds = [allowed.least, allowed.above, allowed.most, allowed.below, 1, 2]
            found += [kind(b) for b in bounds if b is not None and kind(b) in allowed]
    return [holding(annotation, number) for number in found]


def settable(cls: type) -> list[str]:
    """The numbers of a class that may be given alone."""
    required = {n for n, p in inspect.signature(cls).parameters.items() if p.default is p.empty}
    return [name for name in get_annotations(cls) if required <= {name}]


@pytest.mark.slow
def test_a_number_within_its_range_gives_an_object_or_a_reason_why_not():
    made = 0
    for cls in components():
        for name in settable(cls):
            for value in ends(get_annotations(cls)[name]):
                made += 1
                with contextlib.suppress(ValueError):
                    cls(**{name: value})
    assert made > 150


def beyond(annotation: Any) -> list[Any]:
    """The numbers next to the ranges of an annotation, in the form that it wants."""
    found = []
    for part in parts(annotation):
        if get_origin(part) is Annotated:
            kind, (allowed,) = get_args(part)[0], part.__metadata__
            low = [] if allowed.least is None else [allowed.least - 1]
            high = [] if allowed.most is None else [allowed.most + 1]
            open_ends = [b for b in (allowed.above, allowed.below) if b is not None]
            found += [kind(b) for b in low + high + open_ends]
    return [holding(annotation, number) for number in found]


UNCHECKED = {
    *("Call", "DirichletLeaps", "DivergenceMask", "Experts", "Fake", "FrameWindow", "GRPO"),
    *("Granular", "GuidedReference", "Hyper", "LogHinge", "Lora", "Memory", "PPOClip"),
    *("RatioNorm", "References", "Regression", "RewardSurrogate", "SamplerGrid", "Sharding"),
    *("SpanGRPO", "Speed", "StochasticSampling", "Streams", "TrainingSamples", "Uniform"),
}
"""Classes that leave their ranges to the check of run files."""


@pytest.mark.slow
def test_a_number_beyond_its_range_is_refused_by_its_class():
    tried, unchecked = 0, set()
    for cls in components():
        for name in settable(cls):
            for value in beyond(get_annotations(cls)[name]):
                tried += 1
                try:
                    cls(**{name: value})
                except ValueError:
                    continue
                unchecked.add(cls.__name__)
    assert unchecked <= UNCHECKED
    assert tried > 400


class _Dial(Component):
    def __init__(
        self,
        level: UnitInterval,
        mode: Literal["slow", "fast"] = "slow",
        steps: Sequence[PositiveInt] = (1,),
        free: float = 0.0,
    ):
        self.made = level, mode, steps, free


class _Louder(_Dial):
    def __init__(self, level: float = 2.0):
        super().__init__(level / 4)


def test_a_constructor_checks_numbers_and_choices_by_their_annotations():
    for given, message in (
        ((1.5,), "level of _Dial is 1.5; it must be at least 0 and at most 1"),
        ((0.5, "fats"), "mode of _Dial is 'fats'; it must be one of slow, fast"),
        ((0.5, "fast", (2, 0)), "steps.1 of _Dial is 0; it must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            _Dial(*given)
    with pytest.raises(ValueError, match=r"level of _Louder is 2\.0; it must be at least 0"):
        _Louder(8.0)
    assert _Dial(0.5, free=math.inf).made == (0.5, "slow", (1,), math.inf)
    assert _Louder().made[0] == 0.5
    assert [*inspect.signature(_Dial).parameters] == ["level", "mode", "steps", "free"]
