"""Variables that a notebook and a worker both have: which have changed since both had the same, and their transfer.

Each side has a `VariableTracker` of its namespace. It knows a variable by the digest of its pickle at the last transfer
in either direction, so that a value that stays as it is stays where it is, such as a model on the worker's GPU.
"""

from __future__ import annotations

import enum
import hashlib
import io
import logging
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpu_launch.common import exchange
from gpu_launch.common.exchange import CannotPickle, TooLarge
from gpu_launch.units import format_memory

#: Sizes from here on are shown.
LARGE_BYTES = 10_000_000
_MAIN = "__main__"
#: Objects of these types are shared by variables that have nothing else to do with each other.
_NEVER_SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, enum.Enum, logging.Logger)


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What the other side lacks."""

    #: The pickled variables, None for none; objects that several of them share stay shared.
    data: bytes | None = None
    #: Bytes of each variable in `data`.
    sizes: Mapping[str, int] = field(default_factory=dict)
    #: Names of modules by the name of their variable.
    modules: Mapping[str, str] = field(default_factory=dict)
    #: Why a variable is not in `data`: it cannot be pickled, or is too large.
    refused: Mapping[str, str] = field(default_factory=dict)
    too_large: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Fingerprint:
    digest: bytes
    size: int
    #: Objects that another variable may contain as well. They are kept, so that their ids stay unique.
    parts: tuple[Any, ...]
    #: Variables that functions and classes within the value use.
    needs: frozenset[str]


class VariableTracker:
    """The variables in `namespace` that the other side has as well."""

    def __init__(
        self,
        namespace: dict[str, Any],
        *,
        find_names: Callable[[Any, dict[str, Any]], Iterable[str]],
        rename: Callable[[str], str | None] | None = None,
    ) -> None:
        """`find_names` returns the names in the namespace that a function, or the methods of a class, use."""
        self._namespace, self._find_names, self._rename = namespace, find_names, rename
        self._digests: dict[str, bytes] = {}
        #: Ids of values that were too large, which take long to pickle.
        self._large: dict[str, int] = {}

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Note that the other side does not have these any more; without names, nothing."""
        for name in list(self._digests if names is None else names):
            self._digests.pop(name, None)

    def find_changes(self, names: Iterable[str], *, limit: int, wanted: Collection[str] = ()) -> Changes:
        """Return those of `names` that the other side lacks or has in an older state, and note that it gets them.

        Those that functions and classes within their values use are treated like them. Variables that share an object
        with one of these are sent with it. One whose pickle has more than `limit` bytes is refused, except those in
        `wanted` and those that the other side has in an older state, for which only the limit of an exchange counts.
        """
        values: dict[str, Any] = {}
        limits: dict[str, int] = {}
        prints: dict[str, _Fingerprint] = {}
        refused: dict[str, str] = {}
        too_large: set[str] = set()
        pending = list(names)
        while pending:
            name = pending.pop(0)
            if name in values or name not in self._namespace:
                continue
            value = values[name] = self._namespace[name]
            limits[name] = exchange.MAX_BYTES if name in wanted or name in self._digests else limit
            if isinstance(value, types.ModuleType):
                continue
            if self._large.get(name) == id(value) and name not in wanted:
                too_large.add(name)
                continue
            try:
                prints[name] = self._take_fingerprint(name, value, limits[name])
                pending += sorted(prints[name].needs)
                self._large.pop(name, None)
            except CannotPickle as error:
                refused[name] = str(error)
            except TooLarge:
                self._large[name] = id(value)
                too_large.add(name)
        modules = {name: value.__name__ for name, value in values.items() if isinstance(value, types.ModuleType)}
        changed = {name for name, taken in prints.items() if taken.digest != self._digests.get(name)}
        chosen = _add_sharing(changed, prints)
        new_modules = {name: module for name, module in modules.items() if self._digests.get(name) != module.encode()}
        data = self._dump({name: values[name] for name in values if name in chosen})
        if data is None:
            # Large ones must not keep the others from being sent.
            small = frozenset(name for name in chosen if prints[name].size <= limit)
            data = self._dump({name: values[name] for name in values if name in small})
            too_large |= chosen if data is None else chosen - small
            chosen -= too_large
        self._digests |= {name: prints[name].digest for name in chosen}
        self.note_modules(new_modules)
        sizes = {name: prints[name].size for name in values if name in chosen}
        refused |= {name: f"more than {_format_limit(limits[name])}" for name in too_large}
        return Changes(data=data, sizes=sizes, modules=new_modules, refused=refused, too_large=frozenset(too_large))

    def note_outdated(self, names: Iterable[str]) -> None:
        """Note that the other side has another value of these, or none."""
        self._digests |= dict.fromkeys(names, b"")

    def list_outdated(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of `names` that were sent in either direction, and that this side has changed or lacks now."""
        return tuple(name for name in names if name in self._digests and not self._is_current(name))

    def list_withdrawn(self, refused: Collection[str]) -> tuple[str, ...]:
        """Return the names that were sent in either direction, and that this side lacks now or cannot send again."""
        return tuple(name for name in self._digests if name not in self._namespace or name in refused)

    def apply(self, data: bytes, *, limit: int) -> tuple[str, ...]:
        """Take the variables of the other side's `Changes.data`; return their names.

        Raises:
            Exception: Whatever the code of a value raises when it is read.
        """
        values: dict[str, Any] = _SharedUnpickler(io.BytesIO(data), self._namespace).load()
        self._namespace.update(values)
        for name, value in values.items():
            self._note(name, value, limit)
        return tuple(values)

    def note_modules(self, modules: Mapping[str, str]) -> None:
        """Note that both sides have these modules."""
        self._digests |= {name: module.encode() for name, module in modules.items()}

    def _is_current(self, name: str) -> bool:
        if name not in self._namespace:
            return False
        value = self._namespace[name]
        if isinstance(value, types.ModuleType):
            return self._digests[name] == value.__name__.encode()
        try:
            return self._digests[name] == self._take_fingerprint(name, value, exchange.MAX_BYTES).digest
        except (CannotPickle, TooLarge):
            return False

    def _note(self, name: str, value: Any, limit: int) -> None:
        try:
            self._digests[name] = self._take_fingerprint(name, value, limit).digest
        except (CannotPickle, TooLarge):
            self._digests.pop(name, None)

    def _dump(self, values: Mapping[str, Any]) -> bytes | None:
        """Return one pickle of all values; None for none, and where they are too large together."""
        if not values:
            return None
        buffer = exchange.LimitedBuffer()
        try:
            exchange.dump_into(buffer, dict(values), "", rename=self._rename, reduce=self._share_globals)
        except TooLarge:
            return None
        return buffer.getvalue()

    def _take_fingerprint(self, name: str, value: Any, limit: int) -> _Fingerprint:
        parts: list[Any] = []
        needs: set[str] = set()

        def reduce(obj: Any, reduced: Any) -> Any:
            if isinstance(obj, (types.FunctionType, type)) and reduced is not NotImplemented:
                needs.update(self._find_names(obj, self._namespace))
            if isinstance(obj, type) and obj is not value and reduced is not NotImplemented:
                # A class of the notebook within a value: which one it is counts, not its code.
                return str, (str(id(obj)),)
            if hasattr(obj, "__dict__") and not isinstance(obj, _NEVER_SHARED):
                parts.append(obj)
            return self._share_globals(obj, reduced)

        digest = _DigestWriter(limit)
        exchange.dump_into(digest, value, name, rename=self._rename, reduce=reduce)
        return _Fingerprint(digest.hash.digest(), digest.size, tuple(parts), frozenset(needs))

    def _share_globals(self, obj: Any, reduced: Any) -> Any:
        """Leave out the globals of a function of this namespace: it finds those of the other side."""
        if isinstance(obj, types.FunctionType) and obj.__globals__ is self._namespace and isinstance(reduced, tuple):
            state, slots = reduced[2]
            return (*reduced[:2], (state, slots | {"__globals__": {}}), *reduced[3:])
        return reduced


def _format_limit(limit: int) -> str:
    return format_memory(limit // 1024**2)


def _add_sharing(changed: Collection[str], prints: Mapping[str, _Fingerprint]) -> frozenset[str]:
    """Return the changed variables, and those that share an object with one of them."""
    chosen = set(changed)
    shared = {id(part) for name in chosen for part in prints[name].parts}
    while more := {
        name for name in prints.keys() - chosen if not shared.isdisjoint(id(part) for part in prints[name].parts)
    }:
        chosen |= more
        shared |= {id(part) for name in more for part in prints[name].parts}
    return frozenset(chosen)


class _DigestWriter(io.RawIOBase):
    """Takes bytes for their digest and number alone."""

    def __init__(self, limit: int) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self.size = 0
        self._limit = limit

    def write(self, data: Any, /) -> int:
        count = memoryview(data).nbytes
        self.size += count
        if self.size > self._limit:
            raise TooLarge
        self.hash.update(data)
        return count


class _SharedUnpickler(exchange.Unpickler):
    """Gives functions of the other side's main module the globals of this side."""

    def __init__(self, file: io.BytesIO, namespace: dict[str, Any]) -> None:
        super().__init__(file)
        self._namespace = namespace

    def find_class(self, module: str, name: str, /) -> Any:
        found = super().find_class(module, name)
        if (module, name) != ("cloudpickle.cloudpickle", "_make_function"):
            return found

        def make(code: types.CodeType, base_globals: dict[str, Any], *parts: Any) -> Any:
            is_main = base_globals.get("__name__", _MAIN) == _MAIN
            return found(code, self._namespace if is_main else base_globals, *parts)

        return make
