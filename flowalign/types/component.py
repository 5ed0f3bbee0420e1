"""Base of classes that run files name: their constructors check and keep their arguments."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from flowalign.types.ranges import find_wrong_arguments

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
