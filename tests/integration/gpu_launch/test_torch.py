"""The parts of gpu_launch that depend on torch: torchrun's flags, and tensors as metrics."""

from __future__ import annotations

import json

import pytest
import torch
from torch.distributed.run import get_args_parser

import gpu_launch
from gpu_launch.options import conflicts, definition

pytestmark = pytest.mark.torch


def test_every_flag_of_torchrun_is_supported_or_refused_with_a_reason():
    """Flags are read from torchrun's own parser: a new one fails this test until it is in one of the two tables."""
    actions = get_args_parser()._actions
    longs = {
        option.removeprefix("--").replace("_", "-")
        for action in actions
        for option in action.option_strings
        if option.startswith("--")
    }
    assert longs - {*definition.BY_LABEL, *conflicts.REFUSED} == set()
    shorts = {option for action in actions for option in action.option_strings if not option.startswith("--")}
    assert shorts == {flag for option in definition.OPTIONS for flag in option.opts if not flag.startswith("--")}
    assert set(conflicts.REFUSED) <= longs
    assert not set(definition.BY_LABEL) & set(conflicts.REFUSED)
    switches = {name for action in actions if action.nargs == 0 for name in _names(action)}
    assert (
        switches & set(definition.BY_LABEL)
        == {label for label, option in definition.BY_LABEL.items() if option.is_flag} & longs
    )


def _names(action):
    return {option.removeprefix("--").replace("_", "-") for option in action.option_strings if option.startswith("--")}


def test_tensor_with_one_element_is_reported_as_a_number(tmp_path, monkeypatch):
    """A tensor with one element is reported as a number, any other as text."""
    path = tmp_path / "progress-0.json"
    monkeypatch.setenv("GPU_LAUNCH_PROGRESS", str(path))
    gpu_launch.report(1, 1, loss=torch.tensor(0.25), many=torch.ones(2))
    assert json.loads(path.read_text())["metrics"] == {"loss": 0.25, "many": "tensor([1., 1.])"}
