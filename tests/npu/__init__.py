"""Tests of the Ascend device: the real torch_npu over a stand-in for the Ascend runtime."""
