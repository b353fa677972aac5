"""The transfer suite on CPU devices, and on CUDA where there is a GPU; what has no layout here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.layouts import DENSE, REFUSED, ROWS
from tests.transfers import TransferSuite, each_row
from tierkv.connectors.vllm.kv_layout import describe_layers
from tierkv.device.accelerator import AcceleratorCopyEngine
from tierkv.device.cpu import CpuCopyEngine
from tierkv.device.cuda import CudaHooks
from tierkv.errors import LayoutMismatchError

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")


class TestCpu(TransferSuite):
    @pytest.fixture
    def engine(self):
        engine = CpuCopyEngine()
        yield engine
        engine.close()


@no_gpu
class TestCuda(TransferSuite):
    device = torch.device("cuda:0")

    @pytest.fixture
    def engine(self):
        engine = AcceleratorCopyEngine(self.device, CudaHooks())
        yield engine
        engine.close()


# ---- the table itself --------------------------------------------------------------------------


@each_row
def test_the_table_has_unused_bytes_where_it_says(row):
    """Else nothing would show that padding is left alone."""
    layout = row("cpu")
    unused = sum(len(places) for places in layout.unused())
    assert (unused == 0) == (row in DENSE)


@each_row
def test_blocks_of_the_table_share_no_byte(row):
    layout = row("cpu")
    used = [(number, at) for block in range(layout.blocks) for number, at in layout.places(block)]
    for number, raw in enumerate(layout.memory.all):
        places = [at for where, at in used if where == number]
        counts = np.bincount(np.concatenate(places), minlength=len(raw))
        assert counts.max() == 1, "a block's bytes are its own"


def test_the_table_has_each_row_once():
    assert len(set(ROWS)) == len(ROWS)
    assert set(DENSE) < set(ROWS)


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.__name__)
def test_what_is_not_supported_is_refused_by_name(refused):
    layout, words = refused("cpu")
    with pytest.raises(LayoutMismatchError) as raised:
        describe_layers(layout.tensors, layout.blocks, layout.pages)
    assert [word for word in words if word not in str(raised.value)] == []


@pytest.mark.parametrize(
    ("caches", "words"),
    [
        ({"l0": ()}, "l0"),
        ({"l0": (None, None)}, "l0"),
        ({"l0": "tensor"}, "l0"),
        ({"l0": 3}, "l0"),
        ({"l0": [torch.empty(8, 64), 3]}, r"l0\[1\]"),
    ],
)
def test_what_is_no_tensor_is_refused_by_name(caches, words):
    with pytest.raises(LayoutMismatchError, match=words):
        describe_layers(caches, 8)
