"""Functions that are called when a module has been imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from gpu_launch.common.import_hook import call_after_import

MODULE = "imported_by_this_test"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that nothing has imported; what is imported or installed meanwhile is gone afterwards."""
    (tmp_path / f"{MODULE}.py").write_text("number = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, MODULE, raising=False)


def test_several_functions_are_called_in_order() -> None:
    """Each gets the module once, after its code has run; nothing is left that looks for it."""
    before, called = [*sys.meta_path], []
    for name in ("first", "second", "third"):
        call_after_import(MODULE, lambda module, name=name: called.append((name, module.number)))
    assert importlib.util.find_spec(MODULE) is not None
    assert called == []
    module = importlib.import_module(MODULE)
    assert called == [("first", 1), ("second", 1), ("third", 1)]
    assert sys.meta_path == before
    for loader in (module.__loader__, module.__spec__.loader):
        assert type(loader).__module__ != call_after_import.__module__
    call_after_import(MODULE, lambda module: called.append(("at once", module.number)))
    assert called[-1] == ("at once", 1)


def test_missing_module_still_raises_an_import_error() -> None:
    """The hooks do not hide that a module is missing."""
    for _ in range(2):
        call_after_import("no_such_module_here", print)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module_here'"):
        importlib.import_module("no_such_module_here")
