"""How KV tensors are read as runs of bytes, and what is refused; the bytes are in transfers.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tierkv.connectors.vllm.kv_layout import PageSize, describe, describe_layers
from tierkv.device.layout import KvLayout, Pages
from tierkv.errors import LayoutMismatchError


def test_overlapping_tensors_are_refused_by_name():
    storage = torch.zeros(4 * 64)
    tensors = {"one": storage[:128].view(4, 1, 32), "two": storage[64:192].view(4, 1, 32)}
    with pytest.raises(LayoutMismatchError, match="one and two share memory"):
        describe_layers(tensors, 4)


def test_interleaved_layers_do_not_overlap():
    storage = torch.arange(4 * 2 * 32, dtype=torch.float32).view(4, 2, 32)
    layers = describe_layers({"one": storage[:, 0], "two": storage[:, 1]}, 4)
    assert [layer.page_bytes for layer in layers] == [128, 128]
    assert layers[0].block_stride == 256


def test_a_page_with_its_dimensions_in_another_order_is_one_run():
    tensor = torch.zeros(4, 32, 16).transpose(1, 2)
    (layer,) = describe_layers({"one": tensor}, 4)
    assert (layer.page_bytes, layer.block_stride) == (2048, 2048)
    (other,) = describe_layers({"one": torch.zeros(4, 16, 32)}, 4)
    assert layer.form != other.form, "other strides are other bytes"


def test_a_page_with_gaps_becomes_several_runs():
    heads_outermost = torch.zeros(2, 4, 16, 8).transpose(0, 1)
    layers = describe_layers({"one": heads_outermost}, 4)
    assert [layer.name for layer in layers] == ["one/0", "one/1"]
    assert [layer.page_bytes for layer in layers] == [512, 512]
    assert layers[1].base - layers[0].base == 4 * 512


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 1, 8).expand(4, 3, 8), torch.zeros(4, 100, 2)[:, :, :1]],
    ids=["the same bytes several times", "too many gaps"],
)
def test_a_page_that_cannot_be_copied_in_runs_is_refused(tensor):
    with pytest.raises(LayoutMismatchError, match=r"layer one: .* not contiguous"):
        describe_layers({"one": tensor}, 4)


def test_blocks_that_overlap_are_refused():
    tensor = torch.zeros(64).as_strided((4, 16), (8, 1))
    with pytest.raises(LayoutMismatchError, match=r"layer one: .* they overlap"):
        describe_layers({"one": tensor}, 4)


def test_a_layer_of_several_tensors_is_several_runs():
    described = describe({"one": (torch.zeros(4, 8), None, torch.zeros(4, 2))}, 4)
    assert described.by_layer == {"one": ("one[0]", "one[2]")}
    assert [run.page_bytes for run in described.runs] == [32, 8]


def test_layers_that_share_one_cache_are_copied_once():
    tensor = torch.zeros(4, 8)
    described = describe({"one": tensor, "two": tensor}, 4)
    assert [run.name for run in described.runs] == ["one"]
    assert described.by_layer == {"one": ("one",), "two": ("one",)}


@pytest.mark.parametrize("cache", [[], (None,), "text", 5, ("text",)])
def test_what_is_no_tensor_is_refused_by_name(cache):
    with pytest.raises(LayoutMismatchError, match="layer one"):
        describe_layers({"one": cache}, 4)


def test_key_and_value_outermost_are_two_runs():
    layers = describe_layers({"one": torch.zeros(2, 8, 16)}, 8)
    assert [(layer.name, layer.page_bytes) for layer in layers] == [
        ("one[0]", 64),
        ("one[1]", 64),
    ]


def test_the_engines_page_size_tells_split_blocks_from_spare_rows():
    tensor = torch.zeros(16, 8)
    (split,) = describe_layers({"one": tensor}, 8, {"one": PageSize(64, 64)})
    (spare,) = describe_layers({"one": tensor}, 8, {"one": PageSize(32, 32)})
    assert (split.page_bytes, spare.page_bytes) == (64, 32)
    (padded,) = describe_layers({"one": tensor[:9]}, 8, {"one": PageSize(32, 48)})
    assert padded.page_bytes == 32


@pytest.mark.parametrize(
    ("rows", "page"),
    [
        (19, PageSize(64, 64)),  # two rows per block and three to spare
        (16, PageSize(64, 64)),
    ],
)
def test_spare_rows_behind_split_blocks_stay_unused(rows, page):
    (layer,) = describe_layers({"one": torch.zeros(rows, 8)}, 8, {"one": page})
    assert (layer.page_bytes, layer.block_stride) == (64, 64)


@pytest.mark.parametrize(
    ("tensors", "page"),
    [
        (torch.zeros(12, 8), PageSize(64, 64)),  # neither 8 blocks of two rows nor 8 rows
        (torch.zeros(16, 8), PageSize(48, 64)),  # one row and a half, or two
        (torch.zeros(7, 8), PageSize(32, 32)),
        (torch.zeros(12, 8), None),
        ((torch.zeros(8, 8), torch.zeros(16, 8)), None),
        ((torch.zeros(8, 8), torch.zeros(16, 8)), PageSize(64, 64)),
        (torch.zeros(8, 0), None),
    ],
)
def test_rows_that_may_be_read_in_two_ways_are_refused(tensors, page):
    pages = None if page is None else {"one": page}
    with pytest.raises(LayoutMismatchError, match=r"layer one: .* rows"):
        describe_layers({"one": tensors}, 8, pages)


def test_a_page_may_hold_more_than_the_tensors():
    (layer,) = describe_layers({"one": torch.zeros(8, 8)}, 8, {"one": PageSize(64, 64)})
    assert (layer.page_bytes, layer.block_stride) == (32, 32)


def test_more_bytes_than_the_engine_counts_are_refused():
    with pytest.raises(LayoutMismatchError, match=r"layer one: 32 bytes per block, .* counts 16"):
        describe_layers({"one": torch.zeros(8, 8)}, 8, {"one": PageSize(16, 16)})


def test_blocks_split_by_the_kernel_are_described_as_the_engine_counts_them():
    (layer,) = describe_layers({"one": torch.zeros(16, 8)}, 4)
    assert layer.page_bytes == 4 * 32
    assert layer.blocks == 4


def test_neighbouring_pages_move_as_one():
    tensor = torch.zeros(8, 64, dtype=torch.uint8)
    layout = KvLayout(describe_layers({"l": tensor}, 8), 4)
    pages = Pages((2, 3, 4, 7), (0, 0, 0, 0), (0, 1, 2, 3))
    copies = layout.descriptors(["l"], pages, 0, 0)
    assert copies.sizes.tolist() == [192, 64]
    assert np.diff(copies.host).tolist() == [192]


def test_layers_that_follow_each_other_in_a_block_move_as_one():
    storage = torch.zeros(8, 3, 64, dtype=torch.uint8)
    tensors = {f"l{at}": storage[:, at] for at in range(3)}
    layout = KvLayout(describe_layers(tensors, 8), 1)
    pages = Pages((2, 5), (0, 4096), (0, 0))
    copies = layout.descriptors(layout.names, pages, 0, 0)
    assert copies.sizes.tolist() == [192, 192]
    single = layout.descriptors(["l1"], pages, 0, 0)
    assert single.sizes.tolist() == [64, 64]
    assert (single.host - copies.host).tolist() == [64, 64]
    apart = KvLayout(describe_layers(tensors, 8), 2)
    copies = apart.descriptors(apart.names, Pages((2, 5), (0, 0), (0, 1)), 0, 0)
    assert copies.sizes.tolist() == [64] * 6, "in a slot of two blocks layers lie apart"
