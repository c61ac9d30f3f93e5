"""The worker's side of `%%gpu`: takes the notebook's variables before a cell, and returns what it made."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpu_launch.common.exchange import MAX_BYTES
from gpu_launch.common.variables import Changes, VariableTracker
from gpu_launch.sessions import cell_names

#: Larger values that the notebook does not have stay on the worker, unless the cell names them with `--return`.
RETURN_BYTES = 256 * 1024**2


class RankVariables:
    """The variables of the worker's namespace that the notebook has as well."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._tracker = VariableTracker(namespace, find_names=cell_names.find_function_names)
        #: Ids of the values before the cell, and names that its code uses or binds, or that it asked for.
        self._before: dict[str, int] = {}
        self._named: frozenset[str] = frozenset()
        self._wanted: tuple[str, ...] = ()
        #: Submodules that the cell's statements import.
        self._imports: tuple[str, ...] = ()
        #: All that was sent with the cell could be read.
        self.has_taken = False

    def take(self, sent: Mapping[str, Any], frames: Sequence[bytes]) -> None:
        """Take what the notebook sent with a cell, see `GpuCellManager._prepare`.

        Raises:
            Exception: A value cannot be read here, or a module cannot be imported.
        """
        self.has_taken = False
        self._named, self._wanted = frozenset(sent["named"]), tuple(sent["wanted"])
        self._imports = tuple(sent.get("imports", ()))
        self._tracker.note_outdated(sent["outdated"])
        removed = sent.get("removed", ())
        self._tracker.forget(removed)
        for name in removed:
            self._namespace.pop(name, None)
        try:
            for name, module in sent["modules"].items():
                self._namespace[name] = importlib.import_module(module)
            for module in sent.get("submodules", ()):
                # Where it cannot be imported, the cell's own error says so.
                with contextlib.suppress(ImportError):
                    importlib.import_module(module)
            self._tracker.note_modules(sent["modules"])
            for data in frames:
                self._tracker.apply(data, limit=MAX_BYTES)
            self.has_taken = True
        except Exception as error:
            error.add_note("gpu_launch: what the notebook sent cannot be read on the worker")
            raise
        finally:
            self._before = _list_ids(self._namespace)

    def list_submodules(self) -> list[str]:
        """Return the submodules that the cell's statements have imported."""
        return [name for name in self._imports if name in sys.modules]

    def find_changes(self) -> tuple[Changes, tuple[str, ...]]:
        """Return what the cell has made or changed, and the names that it has deleted."""
        after = _list_ids(self._namespace)
        rebound = {name for name, value_id in after.items() if self._before.get(name) != value_id}
        # A function may change any variable that it names.
        candidates = cell_names.find_all_names(rebound.union(self._named, self._wanted), self._namespace)
        changes = self._tracker.find_changes(
            sorted(candidates & after.keys()),
            limit=RETURN_BYTES,
            wanted=self._wanted,
        )
        missing = {name: "the worker has no such variable" for name in self._wanted if name not in after}
        return replace(changes, refused={**changes.refused, **missing}), tuple(sorted(self._before.keys() - after))


def _list_ids(namespace: Mapping[str, Any]) -> dict[str, int]:
    # Not the values, which would keep a GPU's memory.
    return {name: id(value) for name, value in namespace.items() if not name.startswith("_")}
