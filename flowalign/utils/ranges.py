"""Check settings and arguments by ranges of numbers, which are type annotations.

    warmup: NonNegativeInt = 0
    quality: Annotated[int, Range(least=1, most=100)] = 95

Every number must be finite, even without a range, because NaN passes a negated comparison such as
`not x < 0`. Null is allowed if the type allows None.
"""

import dataclasses
import inspect
import types
import typing
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, NewType, TypeAlias

LARGEST_INT, LARGEST_SEED = 2**31 - 1, 2**63 - 1
LARGEST_FLOAT = 3.4028234663852886e38
"""Largest float32 number, because networks compute in float32 or less."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Range of a number; the bounds `least` and `most` are inclusive, `above` and `below` not."""

    least: int | float | None = None
    above: int | float | None = None
    most: int | float | None = None
    below: int | float | None = None

    def __contains__(self, value: int | float) -> bool:
        """Return whether a number is finite and within the bounds."""
        return (
            -LARGEST_FLOAT <= value <= LARGEST_FLOAT
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def said_to(self, value: int | float) -> str:
        """Return the bounds as an error message about `value` names them."""
        said = {"at least": self.least, "above": self.above, "below": self.below}
        if self.most is not None and (self.most not in _TECHNICAL or value > self.most):
            said["at most"] = self.most
        bounds = [f"{words} {bound}" for words, bound in said.items() if bound is not None]
        return " and ".join(bounds) or "a finite float32 number"


_TECHNICAL = (LARGEST_INT, LARGEST_SEED)
"""Bounds that a message names only if the value exceeds them."""

PositiveInt: TypeAlias = Annotated[int, Range(least=1, most=LARGEST_INT)]
NonNegativeInt: TypeAlias = Annotated[int, Range(least=0, most=LARGEST_INT)]
Seed: TypeAlias = Annotated[int, Range(least=0, most=LARGEST_SEED)]
DenoisingSteps: TypeAlias = Annotated[int, Range(least=1, most=10_000)]
GroupSize: TypeAlias = Annotated[int, Range(least=1, most=100_000)]
"""Number of samples of one prompt."""
FiniteFloat: TypeAlias = Annotated[float, Range()]
PositiveFloat: TypeAlias = Annotated[float, Range(above=0)]
NonNegativeFloat: TypeAlias = Annotated[float, Range(least=0)]
UnitInterval: TypeAlias = Annotated[float, Range(least=0, most=1)]
"""A share or a probability."""
Guidance: TypeAlias = Annotated[float, Range(least=0, most=1000)]
"""Scale of classifier-free or embedded guidance."""
GuidanceScale: TypeAlias = Guidance | Literal["model"]
"""Scale of classifier-free guidance; model: the scale that the run file sets for the policy."""
ImportPath = NewType("ImportPath", str)
"""Dotted path of a function, or `my_file.py:function`."""
Decay: TypeAlias = Annotated[float, Range(least=0, below=1)]
"""Weight of the previous value in a running mean, in [0, 1)."""


def find_errors(settings: object, kind: type) -> Iterator[tuple[str, str]]:
    """Yield each wrong key, with a text that has its value and the allowed values.

    A key is wrong if its number is out of range, its null is not allowed, or its group is not a
    mapping. `settings` are the parsed settings of an object of class `kind`, with components as
    `class_path` and `init_args`. No object is built.
    """
    yield from _wrong_in(_settings(settings) or {}, get_annotations(kind), "")


def require_ranges(settings: object, name: str = "") -> None:
    """Check the numbers of a settings object, which run files call `name`; "": the whole file.

    Raises:
        ValueError: A number is out of range; names the key of the first one.
    """
    for key, what in find_errors(vars(settings), type(settings)):
        raise ValueError(f"{name}.{key} is {what}".removeprefix("."))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of settings that check their numbers; `key` is their key in run files."""

    _key: ClassVar[str] = ""

    def __init_subclass__(cls, key: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._key = key or cls._key

    def __post_init__(self) -> None:
        """Reject settings outside their ranges."""
        require_ranges(self, self._key)


def find_wrong_arguments(
    function: Callable[..., object], given: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the name of each argument outside of its range or choices, with a text as above."""
    known = {k: one for k, one in get_annotations(function).items() if _is_restricted(one)}
    yield from _wrong_in({k: given[k] for k in known if k in given}, known, "")


def _is_restricted(annotation: Any) -> bool:
    """Return whether an annotation has a range of numbers, or names the allowed texts."""
    if isinstance(annotation, Range) or typing.get_origin(annotation) is Literal:
        return True
    parts = (*typing.get_args(annotation), *getattr(annotation, "__metadata__", ()))
    return any(map(_is_restricted, parts))


@cache
def get_annotations(kind: Callable[..., object]) -> Mapping[str, Any]:
    """Return the annotation of each setting of a class or function, by its name."""
    annotations = typing.get_type_hints(
        kind.__init__ if inspect.isclass(kind) else kind, include_extras=True
    )
    known = inspect.signature(kind).parameters.items()
    return {
        name: annotations[name] | None if one.default is None else annotations[name]
        for name, one in known
        if name in annotations
    }


def find_annotations(settings: Mapping[str, Any], annotation: Any) -> Mapping[str, Any]:
    """Return the annotations of the settings in a group, a mapping or a component.

    The arguments of a component have its class as annotation.
    """
    if "class_path" in settings:
        module, _, name = str(settings["class_path"]).rpartition(".")
        return {"init_args": getattr(import_module(module), name)}
    found: dict[str, Any] = {}
    for kind in _members(annotation):
        if typing.get_origin(kind) in (dict, Mapping):
            found |= dict.fromkeys(settings, typing.get_args(kind)[1])
        elif is_group(kind) or is_component(kind):
            found |= get_annotations(kind)
    return found


def is_group(annotation: Any) -> bool:
    """Return whether an annotation is a dataclass of settings, which has no subclasses."""
    kinds = annotation.__mro__[:-1] if inspect.isclass(annotation) else ()
    return bool(kinds) and all(map(dataclasses.is_dataclass, kinds))


def is_component(annotation: Any) -> bool:
    """Return whether a text with this annotation names a class or a function."""
    kinds = [kind for kind in _members(annotation) if not is_group(kind)]
    return str not in kinds and any(
        kind == ImportPath
        or typing.get_origin(kind) is Callable
        or (inspect.isclass(kind) and kind.__module__ not in _PLAIN)
        for kind in kinds
    )


_PLAIN = ("builtins", "typing", "pathlib")
"""Modules of classes that a text does not name, such as `Any`."""


def get_item_annotation(annotation: Any, i: int) -> Any:
    """Return the annotation of the item with this index of a list or tuple."""
    for member in _members(annotation):
        origin, inside = typing.get_origin(member), typing.get_args(member)
        if inspect.isclass(origin) and issubclass(origin, Sequence):
            fixed = origin is tuple and inside[-1] is not Ellipsis
            return (inside[i] if i < len(inside) else Any) if fixed else inside[0]
    return Any


def _wrong(value: object, annotation: Any, key: str) -> Iterator[tuple[str, str]]:
    if what := describe_misfit(value, annotation):
        yield key, what
    elif (settings := _settings(value)) is not None:
        yield from _wrong_in(settings, find_annotations(settings, annotation), key)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for i, item in enumerate(value):
            yield from _wrong(item, get_item_annotation(annotation, i), f"{key}.{i}")


def describe_misfit(value: object, annotation: Any) -> str:
    """Return the error of a null, a number or a group; "" if it is valid."""
    # jsonargparse takes any number, list or null for a nested dataclass that has a default.
    if is_group(annotation) and isinstance(value, _NO_GROUP | None):
        names = ", ".join(field.name for field in dataclasses.fields(annotation))
        return f"{_shown(value)}; it must be a mapping of settings: {names}"
    choices = _choices(annotation)
    if isinstance(value, str) and choices and value not in choices:
        return f"{value!r}; it must be one of {', '.join(choices)}"
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        return ""
    if value is None:
        kinds = list(_alternatives(annotation))
        return "" if None in kinds else f"null; it must be {' or '.join(map(str, kinds))}"
    ranges = list(_ranges(annotation))
    if not ranges or any(value in allowed for allowed in ranges):
        return ""
    said = " or ".join(allowed.said_to(value) for allowed in ranges)
    return f"{_shown(value)}; it must be {said}"


_NO_GROUP = int | float | str | Sequence


def _wrong_in(
    settings: Mapping[str, Any], known: Mapping[str, Any], key: str
) -> Iterator[tuple[str, str]]:
    """Yield the errors in settings with these annotations."""
    for name, value in settings.items():
        inner = key if name == "init_args" else f"{key}.{name}".lstrip(".")
        yield from _wrong(value, known.get(name, Any), inner)


def _ranges(annotation: Any) -> Iterator[Range]:
    """Yield the ranges of the numbers that an annotation allows."""
    if typing.get_origin(annotation) is Annotated:
        found = [mark for mark in annotation.__metadata__ if isinstance(mark, Range)]
        yield from found or _ranges(annotation.__origin__)
    elif annotation in (int, float, Any):
        yield Range()
    elif _is_union(annotation):
        for member in typing.get_args(annotation):
            yield from _ranges(member)


def _alternatives(annotation: Any) -> Iterator[object]:
    """Yield a text per alternative of an annotation; None for null or an unrestricted type."""
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        ranges = list(_ranges(annotation))
        yield from [one.said_to(0) for one in ranges] if ranges else _alternatives(inside[0])
    elif _is_union(annotation):
        for member in inside:
            yield from _alternatives(member)
    elif origin is typing.Literal:
        yield from inside
    elif inspect.isclass(origin or annotation) and annotation not in (Any, object, types.NoneType):
        yield _KINDS.get(origin or annotation, (origin or annotation).__name__)
    else:
        yield None


def _choices(annotation: Any) -> list[str]:
    """Return the texts that an annotation allows; empty if it allows any text or a component."""
    members = [one for one in _members(annotation) if one not in (int, float, types.NoneType)]
    if any(typing.get_origin(one) not in (Literal, Annotated) for one in members):
        return []
    found = [one for member in members for one in typing.get_args(member)]
    return [one for one in found if isinstance(one, str)]


_KINDS = {
    **dict.fromkeys((int, float), "a number"),
    **dict.fromkeys((list, tuple, Sequence), "a list"),
    **dict.fromkeys((dict, Mapping), "a mapping"),
    str: "a text",
    bool: "true or false",
}


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself."""
    return typing.get_args(annotation) if _is_union(annotation) else (annotation,)


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _settings(value: object) -> Mapping[str, Any] | None:
    """Return settings as a mapping, from a Namespace or a mapping; None for other values."""
    if isinstance(value, Namespace):
        return vars(value)
    return value if isinstance(value, Mapping) else None


def _shown(value: object) -> str:
    """Return a value as text for a message; for a long number its count of digits."""
    text = "null" if value is None else str(value)
    if isinstance(value, int) and len(text) > 24:
        return f"a number of {len(text)} digits"
    return text


_GIVEN = "_given_arguments"


class Component:
    """Base of classes whose constructors check numbers and choices by their annotations.

    An object keeps the arguments of its constructor, so that a run file can name it. A component
    may be a dataclass: its fields are its arguments, checked before `__post_init__` of a subclass.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _check_arguments(cls.__init__)

    def __post_init__(self) -> None:
        """Check and keep the fields of a dataclass."""
        kind = type(self)
        _keep_arguments(self, kind, {k: vars(self)[k] for k in inspect.signature(kind).parameters})


def _check_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that raises ValueError for an argument that its annotation excludes."""

    @wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(init).bind(self, *args, **kwargs).arguments
        _keep_arguments(self, init, dict([*given.items()][1:]))
        init(self, *args, **kwargs)

    return checked


def _keep_arguments(
    component: object, init: Callable[..., object], given: Mapping[str, Any]
) -> None:
    for key, what in find_wrong_arguments(init, given):
        raise ValueError(f"{key} of {type(component).__name__} is {what}")
    vars(component).setdefault(_GIVEN, given)  # the subclass comes first


def get_arguments(component: object) -> dict[str, Any]:
    """Return the arguments of a component's constructor by name, with their defaults.

    Raises:
        ValueError: It does not keep an argument.
    """
    kept, found = vars(component), dict[str, Any]()
    for name, one in inspect.signature(type(component)).parameters.items():
        found[name] = kept.get(_GIVEN, kept).get(name, one.default)
        if found[name] is one.empty or (_GIVEN not in kept and name not in kept):
            kind = type(component).__name__
            raise ValueError(f"{kind} does not keep its argument {name}: set self.{name}")
    return found
