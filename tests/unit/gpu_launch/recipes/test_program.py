"""What the programs of recipes check before they start."""

from __future__ import annotations

import importlib.util

import pytest

from gpu_launch.recipes import finetune_main

WORDS = (
    "--model m --data d --method {method} --epochs 1 --steps 1 --batch 1 --sequence 8 --rate 0.1 --adapter-rank 1 "
    "--every 1 --held-out 0 --seed 0 --merge false"
)


def test_missing_package_is_told_in_one_line(monkeypatch, capsys):
    """`qlora` needs one that the other methods do not."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else found(name))
    with pytest.raises(SystemExit, match="2"):
        finetune_main.main(WORDS.format(method="qlora").split())
    assert capsys.readouterr().err.startswith("recipe:finetune: this image has no bitsandbytes: choose one for")
