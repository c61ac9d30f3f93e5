"""Variables travel when they differ, and with what shares objects with them."""

from __future__ import annotations

import math
import threading
import types

import pytest

from gpu_launch.common import exchange
from gpu_launch.common.variables import VariableTracker
from gpu_launch.sessions.cell_names import find_function_names

MIB = 1024**2


class Sides:
    """A notebook and a worker in one process, each with a main module of its own."""

    def __init__(self):
        self.notebook = VariableTracker(self.make_namespace(), find_names=find_function_names)
        self.worker = VariableTracker(self.make_namespace(), find_names=find_function_names)
        self.here, self.there = self.notebook._namespace, self.worker._namespace

    @staticmethod
    def make_namespace():
        return vars(types.ModuleType("__main__"))

    def send(self, *names):
        """Send from the notebook; return the names that travel."""
        return self.move(self.notebook, self.worker, names)

    def bring(self, *names):
        """Bring back from the worker; return the names that travel."""
        return self.move(self.worker, self.notebook, names)

    @staticmethod
    def move(source, target, names):
        changes = source.find_changes(names, limit=MIB)
        assert changes.refused == {}
        moved = () if changes.data is None else target.apply(changes.data, limit=MIB)
        assert sorted(moved) == sorted(changes.sizes)
        return sorted(moved)


@pytest.fixture
def sides():
    return Sides()


def test_only_what_differs_travels(sides):
    """A change in place counts on either side; names that do not exist are passed over."""
    sides.here.update(numbers=[1, 2], text="a")
    assert sides.send("numbers", "text", "missing") == ["numbers", "text"]
    assert sides.send("numbers", "text") == []
    assert sides.bring("numbers", "text") == []
    sides.there["numbers"].append(3)
    assert sides.bring("numbers", "text") == ["numbers"]
    assert sides.here["numbers"] == [1, 2, 3]
    assert sides.send("numbers") == []
    sides.here["numbers"].append(4)
    assert sides.send("numbers", "text") == ["numbers"]
    sides.notebook.forget()
    assert sides.send("numbers", "text") == ["numbers", "text"]


class Part:
    """A mutable part."""

    def __init__(self, value):
        self.value = value


def test_value_of_before_travels_again_where_the_other_side_has_changed_it(sides):
    """Or does not have it any more; the side that changed it says so, without sending it."""
    sides.there.update(step=99, best=1)
    sides.bring("step", "best")
    assert sides.notebook.list_outdated(["step", "best", "missing"]) == ()
    sides.here["step"] = 0
    del sides.here["best"]
    outdated = sides.notebook.list_outdated(["step", "best", "missing"])
    assert outdated == ("step", "best")
    sides.worker.note_outdated(outdated)
    assert sides.bring("step", "best") == ["best", "step"]
    assert (sides.here["step"], sides.here["best"]) == (99, 1)


def test_variables_that_share_an_object_travel_together(sides):
    """And continue sharing it; an equal one of its own stays."""
    part = Part(1)
    sides.here.update(model={"part": part}, optimizer=[part], other=Part(1))
    sides.send("model", "optimizer", "other")
    assert sides.there["optimizer"][0] is sides.there["model"]["part"]
    sides.here["optimizer"].append(2)
    assert sides.send("model", "optimizer", "other") == ["model", "optimizer"]
    assert sides.there["optimizer"][0] is sides.there["model"]["part"]


def test_functions_see_the_variables_of_the_side_they_are_on(sides):
    """A change of a global does not send the function, and a value that it names is not sent inside it."""
    exec(
        "def scaled(x):\n    return factor * x\nfactor = 2\nclass Box:\n    def get(self): return scaled(1)", sides.here
    )
    sides.here["box"] = sides.here["Box"]()
    sides.send("scaled", "factor", "Box", "box")
    assert sides.there["scaled"].__globals__ is sides.there
    assert (sides.there["scaled"](3), sides.there["box"].get()) == (6, 2)
    sides.here["factor"] = 5
    assert sides.send("scaled", "factor", "box") == ["factor"]
    assert (sides.there["scaled"](3), sides.there["box"].get()) == (15, 5)
    sides.there["box"].name = "changed"
    assert sides.bring("box", "factor") == ["box"]
    assert isinstance(sides.here["box"], sides.here["Box"])
    assert sides.here["box"].get() == 5


def test_functions_and_classes_within_a_value_bring_what_they_use(sides):
    """As in a list of objects, or layers of a model; changes of it come back with the value."""
    exec(
        "factor, unused = 2, 3\ndef scaled(x):\n    calls.append(x)\n    return factor * x\n"
        "calls = []\nclass Base:\n    def get(self): return scaled(8)\nclass Layer(Base): pass\n"
        "layers = [Layer()]\ntable = {'scaled': scaled}",
        sides.here,
    )
    assert sides.send("table") == ["calls", "factor", "table"]
    assert sides.there["table"]["scaled"](2) == 4
    assert sides.send("layers") == ["Base", "layers", "scaled"]
    assert sides.there["layers"][0].get() == 16
    assert sides.bring("layers") == ["calls"]
    assert sides.here["calls"] == [2, 8]


def test_what_cannot_travel_is_named(sides):
    """With the reason; a large one unless it is wanted, and a module by its name."""
    sides.here.update(lock=threading.Lock(), large=bytes(2 * MIB), small=1, math=math)
    changes = sides.notebook.find_changes(["lock", "large", "small", "math"], limit=MIB)
    assert changes.refused["lock"].startswith("lock cannot be pickled: ")
    assert (changes.refused["large"], changes.too_large) == ("more than 1 MiB", {"large"})
    assert (list(changes.sizes), changes.modules) == (["small"], {"math": "math"})
    # It is not pickled again to find out the same.
    again = sides.notebook.find_changes(["large", "math"], limit=MIB)
    assert (again.refused, again.modules, again.data) == ({"large": "more than 1 MiB"}, {}, None)
    wanted = sides.notebook.find_changes(["large"], limit=MIB, wanted=("large",))
    assert wanted.sizes["large"] > 2 * MIB


def test_what_the_other_side_has_travels_whatever_its_size(sides):
    """It would keep an older value, and use it."""
    sides.here["data"] = bytearray(MIB // 2)
    assert sides.send("data") == ["data"]
    sides.there["data"] *= 3
    assert sides.bring("data") == ["data"]
    assert len(sides.here["data"]) == 3 * MIB // 2
    assert sides.bring("data") == []


def test_a_large_variable_keeps_no_small_one_from_travelling(sides, monkeypatch):
    """Where all together are too large."""
    monkeypatch.setattr(exchange, "MAX_BYTES", 4 * MIB)
    sides.there.update(a=bytes(3 * MIB), b=bytes(3 * MIB), losses=[1])
    changes = sides.worker.find_changes(["a", "b", "losses"], limit=MIB, wanted=("a", "b"))
    assert (changes.too_large, list(changes.sizes)) == ({"a", "b"}, ["losses"])
    assert sides.notebook.apply(changes.data, limit=MIB) == ("losses",)


def test_all_variables_together_have_a_limit(sides, monkeypatch):
    """Nothing is sent above it."""
    monkeypatch.setattr(exchange, "MAX_BYTES", MIB)
    sides.here.update(a=bytes(MIB // 2 + 1), b=bytes(MIB // 2 + 2))
    changes = sides.notebook.find_changes(["a", "b"], limit=MIB)
    assert (changes.data, changes.too_large) == (None, {"a", "b"})
