"""The transfer suite on CPU devices, and on CUDA where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.transfers import TransferSuite
from tierkv.device.accelerator import AcceleratorCopyEngine
from tierkv.device.cpu import CpuCopyEngine
from tierkv.device.cuda import CudaHooks

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
