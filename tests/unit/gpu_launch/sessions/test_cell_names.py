"""Which variables a cell uses, from its code."""

from __future__ import annotations

import types
import xml.dom.minidom

import pytest

from gpu_launch.sessions import cell_names


@pytest.mark.parametrize(
    ("body", "used"),
    [
        ("y = f(x)", {"f", "x"}),
        ("x += 1", {"x"}),
        ("del x", {"x"}),
        ("x = 1\nprint(x)", {"print"}),
        ("with open('f') as file:\n    file.read()", {"open"}),
        ("for i in range(n):\n    i + k\ni", {"range", "n", "k", "i"}),
        ("while go:\n    a = 1\na", {"go", "a"}),
        ("if a:\n    b = 1\nelse:\n    b = 2\nb", {"a"}),
        ("if a:\n    b = 1\nb", {"a", "b"}),
        ("def g(p, q=r):\n    global t\n    t = s + p\n    return [u for v in w]", {"r", "s", "u", "w"}),
        ("class C(B):\n    a = z\n    def m(self): return self.x + y", {"B", "z", "y"}),
        ("import os.path as p, math\nfrom a import b\np, math, b", set()),
        ("(a, [b, *c]) = d\na, b, c", {"d"}),
        ("lambda a: a + b", {"b"}),
        ("f'{x:{y}}'", {"x", "y"}),
        ("try:\n    x\nexcept E:\n    pass", {"x", "E"}),
        ("x: int\nx", {"x", "int"}),
        ("", set()),
    ],
)
def test_used_names_are_found_without_running_the_cell(body, used):
    """Those that the cell surely gives a value first are not among them."""
    assert cell_names.find_used_names(body) - {"__name__", "__annotations__", "AssertionError"} == used


def test_bound_names_are_those_of_the_module():
    """And those that a function declares as global."""
    body = "a = 1\nimport b.c\ndef f():\n    global d\n    d = e = 2\nfor g in h: pass"
    assert cell_names.find_bound_names(body) == {"a", "b", "f", "d", "g"}


def test_names_of_functions_are_followed():
    """Those of functions, methods, base classes and objects of the notebook's classes, once each."""
    namespace = vars(types.ModuleType("__main__"))
    exec(
        "def f(): return g(), k\ndef g(): return f(), print\nk = 1\nunused = 2\n"
        "class Base:\n    @classmethod\n    def make(cls): return k2\n    @property\n    def p(self): return k3\n"
        "class Net(Base):\n    def run(self): return f()\nk2 = k3 = 0\nnet = Net()",
        namespace,
    )
    assert cell_names.find_all_names(["f", "missing"], namespace) == {"f", "g", "k"}
    assert cell_names.find_all_names(["net"], namespace) == {"net", "Net", "Base", "f", "g", "k", "k2", "k3"}


def test_functions_are_found_within_decorators():
    """Those of libraries and of the notebook, on functions and methods; also in closures and partial calls."""
    namespace = vars(types.ModuleType("__main__"))
    exec(
        "import contextlib, functools\n@contextlib.contextmanager\ndef opened(): yield a\n"
        "@functools.lru_cache\ndef cached(): return b\n"
        "def timed(f):\n    @functools.wraps(f)\n    def inner(): log(f())\n    return inner\n"
        "@timed\ndef twice(): return c\npart = functools.partial(twice)\n"
        "class Net:\n    @functools.cached_property\n    def p(self): return d\n    @staticmethod\n    def s(): return e\n"
        "    @timed\n    def m(self): return f\nbound = Net().m\ndef log(x): pass\na = b = c = d = e = f = 0\n"
        "def loop(): return itself()\nloop.__wrapped__ = loop\n"
        "def delayed():\n    def inner(): return later\n    yield inner\n    later = a\nopen_cell = next(delayed())",
        namespace,
    )
    found = {
        name: cell_names.find_all_names([name], namespace) - {name, "log"}
        for name in ("opened", "cached", "twice", "part", "Net", "bound", "loop", "open_cell")
    }
    assert found == {
        "opened": {"a"},
        "cached": {"b"},
        "twice": {"c"},
        "part": {"c"},
        "Net": {"d", "e", "f"},
        "bound": {"f"},
        "loop": set(),
        "open_cell": set(),
    }


def test_submodules_are_found_by_the_way_to_them():
    """Those that are imported, through whatever name the module has; and those that the cell imports itself."""
    namespace = {"xml": xml, "dom": xml.dom, "text": "a"}
    body = "xml.dom.minidom.parseString(text.upper())\ndom.Node\nf().dom.minidom\nimport a.b as c, d\nfrom e.f import g"
    assert set(cell_names.find_submodules(body, namespace)) == {"xml.dom", "xml.dom.minidom"}
    assert cell_names.find_submodules("dom.minidom.Node", namespace) == ("xml.dom.minidom",)
    assert cell_names.find_imports(body) == ("a.b",)


def test_names_of_ipython_are_not_a_persons():
    """Outputs, and what IPython hides."""
    assert cell_names.select_variables(["a", "_", "__", "_b", "__x__", "In"], {"In": []}) == {"a", "_b"}
