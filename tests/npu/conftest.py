"""torch_npu once per process, and a stand-in that every test finds as new.

Elsewhere than under `make test-npu` there is no torch_npu, and these tests are skipped.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import pytest

from tests.npu.acl import Acl
from tests.npu.standin import StandIn

HERE = Path(__file__).parent
HAS_TORCH_NPU = importlib.util.find_spec("torch_npu") is not None


def pytest_collection_modifyitems(items):
    if HAS_TORCH_NPU:
        return
    skip = pytest.mark.skip(reason="torch_npu is not in this environment; run `make test-npu`")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def npu():
    """torch, with torch_npu in it and device 0 set. Seconds, once per process."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch_npu  # noqa: F401

        torch.npu.set_device(0)
    show_tensors_without_content(torch)
    return torch


def show_tensors_without_content(torch):
    """pytest shows the tensors of a test that fails, and what torch shows it computes first."""
    show = torch.Tensor.__repr__

    def show_briefly(tensor, **options):
        if tensor.device.type != "npu":
            return show(tensor, **options)
        return f"<{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}>"

    torch.Tensor.__repr__ = show_briefly


@pytest.fixture(scope="session")
def acl() -> Acl:
    return Acl()


@pytest.fixture
def standin(npu):
    """The controls of the stand-in. A test that breaks a rule of the runtime must expect it."""
    controls = StandIn()
    controls.reset()
    yield controls
    violations = controls.counts().violations
    last = controls.last_violation
    controls.reset()
    assert violations == 0, f"{violations} violations, the last one: {last}"
