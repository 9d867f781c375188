"""Immutable values with generated equality, without the 16 ms that importing dataclasses costs.

    class Link(Value):
        target: str
        path: str
        why: str = ""

The annotated names are the fields, in order, parents' first; a class attribute is the default. Fields hold
immutable things (str, int, tuple, other values), so a value can be a dictionary's key. Loaded by the programs in
launch/, so it imports nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take this as true; it spares importing typing
if TYPE_CHECKING:
    from typing import Any, ClassVar, Self, dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda cls: cls


@dataclass_transform(frozen_default=True)
class Value:
    """Base of the immutable values: see the module's text."""

    if TYPE_CHECKING:
        _fields: ClassVar[tuple[str, ...]]
    else:
        _fields = ()

        def __init_subclass__(cls):
            # inspect.get_annotations would say the same for the milliseconds that importing inspect costs
            own = tuple(name for name in cls.__dict__.get("__annotations__", ()) if not name.startswith("_"))  # noqa: RUF063
            cls._fields = cls._fields + tuple(name for name in own if name not in cls._fields)

        def __init__(self, *args, **kwargs):
            fields = self._fields
            if len(args) > len(fields):
                raise TypeError(f"{type(self).__name__} takes {len(fields)} fields, got {len(args)}")
            values = self.__dict__
            values.update(zip(fields, args, strict=False))
            for name, value in kwargs.items():
                if name not in fields or name in values:
                    raise TypeError(f"{type(self).__name__}: unexpected or repeated field {name!r}")
                values[name] = value
            for name in fields:
                if name not in values:
                    try:
                        values[name] = getattr(type(self), name)
                    except AttributeError:
                        raise TypeError(f"{type(self).__name__}: field {name!r} is missing") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: can't set {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: can't delete {name!r}")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__dict__ == self.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *(getattr(self, name) for name in self._fields)))

    def __repr__(self) -> str:
        body = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._fields)
        return f"{type(self).__name__}({body})"

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return type(self)(**{**self.__dict__, **changes})

    def to_data(self) -> dict[str, Any]:
        """The value as plain dictionaries, lists and scalars, ready for JSON."""
        return {name: _plain(getattr(self, name)) for name in self._fields}


def _plain(value: Any) -> Any:
    if isinstance(value, Value):
        return value.to_data()
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
