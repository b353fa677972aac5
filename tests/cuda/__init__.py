"""Tests of the CUDA device: its calls on a stand-in, everything else where there is a GPU."""
