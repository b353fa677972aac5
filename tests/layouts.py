"""Every shape in which an engine hands over its KV memory, small: `ROWS`, and `REFUSED` ones.

A row makes its memory from bytes and lays views over it, as the engine does. What TierKV must move
is told by those views alone: `Layout.places` finds the bytes of a block by arithmetic on shapes
and strides of its own, so that it can contradict the code under test. What lies between the views
belongs to nobody and must never change.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tierkv.connectors.vllm.kv_layout import PageSize

BLOCKS = 8
TOKENS = 16
HUGE = 2 << 20

Device = torch.device | str
Part = tuple[int, torch.Tensor]  # number of its memory, block first


class Memory:
    """Bytes of a device, allocated one by one and never moved."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.all: list[torch.Tensor] = []

    def raw(self, size: int) -> torch.Tensor:
        """A new allocation of so many bytes, as uint8."""
        self.all.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        return self.all[-1]

    def own(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with an allocation of its own."""
        return view(self.raw(math.prod(shape) * dtype.itemsize), 0, shape, dtype)

    def aligned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor at a huge page, in a larger allocation: not at the beginning of its storage."""
        raw = self.raw(math.prod(shape) * dtype.itemsize + HUGE)
        return view(raw, -raw.data_ptr() % HUGE, shape, dtype)


def view(
    raw: torch.Tensor,
    first: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    strides: Sequence[int] | None = None,
) -> torch.Tensor:
    """A tensor over bytes. `first` and `strides` in bytes; without strides it is contiguous."""
    item = dtype.itemsize
    if strides is None:
        strides = [item * math.prod(shape[at + 1 :]) for at in range(len(shape))]
    assert first % item == 0, "elements lie at multiples of their size"
    typed = raw[: len(raw) // item * item].view(dtype)
    return typed.as_strided(tuple(shape), [step // item for step in strides], first // item)


@dataclass
class Layout:
    """One row.

    Attributes:
        tensors: what the engine hands over, by layer.
        memory: everything that lies below, as bytes.
        blocks: that the engine's block manager counts.
        pages: what it says of a block of each layer.
        rows: of a tensor, that make a block.
        parts: the tensors by order of the slot, block first, if they are not simply all of
            `tensors` in order.
    """

    tensors: dict[str, object]
    memory: Memory
    blocks: int = BLOCKS
    pages: dict[str, PageSize] | None = None
    rows: int = 1
    parts: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.parts:
            self.parts = list(_flat(self.tensors.values()))

    @functools.cached_property
    def _places(self) -> list[tuple[int, np.ndarray]]:
        return [self._places_of(part) for part in self.parts]

    def _places_of(self, part: torch.Tensor) -> tuple[int, np.ndarray]:
        """Number of the memory, and per block the places of its bytes in it, ascending."""
        at = part.data_ptr()
        inside = [n for n, raw in enumerate(self.memory.all) if 0 <= at - raw.data_ptr() < len(raw)]
        item = part.element_size()
        first = at - self.memory.all[inside[0]].data_ptr()
        axes = [
            np.arange(size) * step * item
            for size, step in zip(part.shape, part.stride(), strict=True)
        ]
        found = functools.reduce(np.add.outer, [*axes, np.arange(item)]) + first
        used = found[: self.blocks * self.rows].reshape(self.blocks, -1)
        return inside[0], np.sort(used, axis=1)

    def places(self, block: int) -> list[tuple[int, np.ndarray]]:
        """Where a block's bytes lie, part by part: which memory, and the places in it."""
        return [(number, rows[block]) for number, rows in self._places]

    def unused(self) -> list[np.ndarray]:
        """Per memory the places that no block of any part covers."""
        masks = [np.ones(len(raw), bool) for raw in self.memory.all]
        for number, rows in self._places:
            masks[number][rows.reshape(-1)] = False
        return [np.flatnonzero(mask) for mask in masks]


def _flat(caches: Iterable[object]) -> Iterable[torch.Tensor]:
    for cache in caches:
        if isinstance(cache, torch.Tensor):
            yield cache
        else:
            yield from (tensor for tensor in cache if tensor is not None)


def _same(names: Iterable[str], payload: int, padded: int = 0) -> dict[str, PageSize]:
    return {name: PageSize(payload, padded or payload) for name in names}


# ---- as vLLM on Ascend lays them out -----------------------------------------------------------


def keys_and_values(device: Device) -> Layout:
    """GQA: a pair, each at a huge page of an allocation of its own."""
    memory, shape = Memory(device), (BLOCKS, TOKENS, 2, 32)
    pair = tuple(memory.aligned(shape, torch.bfloat16) for _ in "kv")
    return Layout({"l0": pair}, memory, pages=_same(["l0"], 2 * TOKENS * 2 * 32 * 2))


def values_of_another_size(device: Device) -> Layout:
    memory = Memory(device)
    pair = [memory.own((BLOCKS, TOKENS, 2, size), torch.bfloat16) for size in (48, 32)]
    return Layout({"l0": tuple(pair), "l1": tuple(
        memory.own((BLOCKS, TOKENS, 2, size), torch.bfloat16) for size in (48, 32)
    )}, memory)  # fmt: skip


def latent(device: Device) -> Layout:
    """MLA: the compressed part and the rotary part."""
    memory = Memory(device)
    pair = tuple(memory.own((BLOCKS, TOKENS, 1, size), torch.bfloat16) for size in (512, 64))
    return Layout({"l0": pair}, memory, pages=_same(["l0"], TOKENS * 576 * 2))


def latent_with_indexer(device: Device) -> Layout:
    """DSA: the indexer is a layer of its own and keeps K alone."""
    memory = Memory(device)
    pair = tuple(memory.own((BLOCKS, TOKENS, 1, size), torch.bfloat16) for size in (128, 64))
    index = (memory.own((BLOCKS, TOKENS, 1, 128), torch.bfloat16),)
    return Layout({"l0": pair, "l0.indexer": index}, memory)


def quantised_indexer(device: Device) -> Layout:
    """Indexer in 8 bits: keys, then all their scales, in one storage."""
    memory = Memory(device)
    keys = BLOCKS * TOKENS * 128
    raw = memory.raw(keys + BLOCKS * TOKENS * 2)
    parts = (
        view(raw, 0, (BLOCKS, TOKENS, 1, 128), torch.int8),
        view(raw, keys, (BLOCKS, TOKENS, 1, 1), torch.float16),
    )
    return Layout({"l0.indexer": parts}, memory, pages=_same(["l0.indexer"], TOKENS * 130))


def keys_without_values(device: Device) -> Layout:
    """Sparse attention in 8 bits, of two versions: V is left out, or is nothing."""
    memory = Memory(device)
    one, other = (memory.own((BLOCKS, TOKENS, 1, 656), torch.int8) for _ in range(2))
    return Layout({"l0": (one,), "l1": (other, None)}, memory)


def keys_and_values_of_two_types(device: Device) -> Layout:
    """Quantised attention: K in 8 bits, V in 16."""
    memory, shape = Memory(device), (BLOCKS, TOKENS, 2, 32)
    pair = (memory.own(shape, torch.int8), memory.own(shape, torch.bfloat16))
    return Layout({"l0": pair}, memory)


def pages_of_a_list(device: Device) -> Layout:
    """DeepSeek V4: views over one storage whose pages alternate, some bytes unused."""
    memory = Memory(device)
    page = TOKENS * 512 + TOKENS * 64 * 2 + 256
    raw = memory.raw(BLOCKS * page)
    parts = [
        view(raw, 0, (BLOCKS, TOKENS, 512), torch.uint8, (page, 512, 1)),
        view(raw, TOKENS * 512, (BLOCKS, TOKENS, 64), torch.bfloat16, (page, 128, 2)),
    ]
    return Layout({"l0": parts}, memory, pages=_same(["l0"], page - 256, page))


def slices_of_one_tensor(device: Device) -> Layout:
    """Attention of a hybrid model: K and V cut from one tensor, behind a pad."""
    memory, shape, pad = Memory(device), (BLOCKS, TOKENS, 2, 32), 1024
    side = math.prod(shape) * 2
    raw = memory.raw(pad + 2 * side)
    pair = tuple(view(raw, pad + at * side, shape, torch.bfloat16) for at in range(2))
    return Layout({"l0": pair}, memory)


def convolution_and_state(device: Device) -> Layout:
    """Mamba: two regions, one behind the other, each of all blocks."""
    memory = Memory(device)
    first = BLOCKS * 3 * 96 * 2
    raw = memory.raw(first + BLOCKS * 4 * 16 * 8 * 4)
    parts = [
        view(raw, 0, (BLOCKS, 3, 96), torch.bfloat16),
        view(raw, first, (BLOCKS, 4, 16, 8), torch.float32),
    ]
    return Layout({"l0": parts}, memory)


def padded_blocks(device: Device) -> Layout:
    """One tensor of hidden states, unused bytes behind each block."""
    memory = Memory(device)
    raw = memory.raw(512 + BLOCKS * 1536)
    states = view(raw, 512, (BLOCKS, 1000), torch.int8, (1536, 1))
    return Layout({"l0": states}, memory, pages=_same(["l0"], 1000, 1536))


# ---- as vLLM lays them out elsewhere -----------------------------------------------------------


def _of_vllm(
    device: Device,
    order: str,
    *,
    layers: int = 2,
    heads: int = 2,
    blocks: int = BLOCKS,
    content: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> Layout:
    """Views [block, head, token, content] of one storage. `order` names it, outermost first."""
    memory = Memory(device)
    sizes = {"L": layers, "B": blocks, "H": heads, "N": TOKENS, "C": content}
    raw = memory.raw(math.prod(sizes.values()) * dtype.itemsize)
    steps = {
        axis: dtype.itemsize * math.prod(sizes[inner] for inner in order[at + 1 :])
        for at, axis in enumerate(order)
    }
    shape, strides = ([of[axis] for axis in "BHNC"] for of in (sizes, steps))
    tensors = {f"l{at}": view(raw, at * steps["L"], shape, dtype, strides) for at in range(layers)}
    page = heads * TOKENS * content * dtype.itemsize
    return Layout(tensors, memory, blocks=blocks, pages=_same(tensors, page))


def layers_outermost(device: Device) -> Layout:
    return _of_vllm(device, "LBHNC")


def latent_of_one_head(device: Device) -> Layout:
    return _of_vllm(device, "LBNHC", heads=1, content=576)


def tokens_before_heads(device: Device) -> Layout:
    """A block is one run, but not in the order of its dimensions."""
    return _of_vllm(device, "LBNHC", heads=2)


def layers_inside_a_block(device: Device) -> Layout:
    return _of_vllm(device, "BLHNC", layers=3)


def heads_outermost(device: Device) -> Layout:
    """A block is one run per head."""
    return _of_vllm(device, "LHBNC")


def heads_around_layers(device: Device) -> Layout:
    """Heads, then layers, inside a block: runs of a block lie between those of other layers."""
    return _of_vllm(device, "BHLNC")


def keys_then_values(device: Device) -> Layout:
    """Releases before 0.29: K of all blocks, then V."""
    memory = Memory(device)
    tensors = {f"l{at}": memory.own((2, BLOCKS, TOKENS, 2, 32), torch.bfloat16) for at in range(2)}
    parts = [tensor[side] for tensor in tensors.values() for side in range(2)]
    return Layout(tensors, memory, pages=_same(tensors, 2 * TOKENS * 2 * 32 * 2), parts=parts)


def states_in_padded_pages(device: Device) -> Layout:
    """Mamba as bytes, in pages as large as those of attention."""
    memory, used, page = Memory(device), 1072, 1280
    raw = memory.raw(BLOCKS * page)
    states = view(raw, 0, (BLOCKS, 1, 1, used), torch.int8, (page, page, page, 1))
    return Layout({"l0": states}, memory, pages=_same(["l0"], used, page))


def blocks_split_by_the_kernel(device: Device) -> Layout:
    """The kernel's blocks are half as large as the block manager's."""
    whole = _of_vllm(device, "LBHNC", blocks=2 * BLOCKS)
    page = 2 * whole.pages["l0"].payload
    return Layout(
        whole.tensors, whole.memory, pages=_same(whole.tensors, page), rows=2, parts=whole.parts
    )


def blocks_split_without_a_page_size(device: Device) -> Layout:
    split = blocks_split_by_the_kernel(device)
    return Layout(split.tensors, split.memory, rows=2, parts=split.parts)


def more_rows_than_blocks(device: Device) -> Layout:
    """The runner allocated more than the block manager hands out."""
    memory, shape = Memory(device), (BLOCKS + 3, TOKENS, 2, 32)
    pair = tuple(memory.own(shape, torch.bfloat16) for _ in "kv")
    return Layout({"l0": pair}, memory, pages=_same(["l0"], 2 * TOKENS * 2 * 32 * 2))


def twice_as_many_rows_as_blocks(device: Device) -> Layout:
    """As above, and a multiple: only the page size tells that no block is split."""
    memory, shape = Memory(device), (2 * BLOCKS, TOKENS, 2, 32)
    pair = tuple(memory.own(shape, torch.bfloat16) for _ in "kv")
    return Layout({"l0": pair}, memory, pages=_same(["l0"], 2 * TOKENS * 2 * 32 * 2))


def eight_bit_floats(device: Device) -> Layout:
    return _of_vllm(device, "LBHNC", dtype=torch.float8_e4m3fn)


def eight_bit_integers(device: Device) -> Layout:
    return _of_vllm(device, "LBHNC", dtype=torch.int8)


def four_bits_and_scales(device: Device) -> Layout:
    """Packed values, and behind those of each token and head two float32 scales; padded pages."""
    memory, heads, content = Memory(device), 2, 64 // 2 + 2 * 4
    used, page = heads * TOKENS * content, 1536
    raw = memory.raw(BLOCKS * page)
    steps = (page, TOKENS * content, content, 1)
    values = view(raw, 0, (BLOCKS, heads, TOKENS, content), torch.uint8, steps)
    return Layout({"l0": values}, memory, pages=_same(["l0"], used, page))


def values_with_scales_beside(device: Device) -> Layout:
    """Values and their float32 scales as two views of each page, which has a pad behind them."""
    memory, values, scales, page = Memory(device), TOKENS * 2 * 64, TOKENS * 2 * 4, 2560
    raw = memory.raw(BLOCKS * page)
    parts = (
        view(raw, 0, (BLOCKS, TOKENS, 2, 64), torch.int8, (page, 128, 64, 1)),
        view(raw, values, (BLOCKS, TOKENS, 2), torch.float32, (page, 8, 4)),
    )
    return Layout({"l0": parts}, memory, pages=_same(["l0"], values + scales, page))


def layers_that_share_a_cache(device: Device) -> Layout:
    """The second layer reads what the first one writes; it is moved once."""
    memory = Memory(device)
    cache, own = (memory.own((BLOCKS, 2, TOKENS, 64), torch.bfloat16) for _ in range(2))
    return Layout({"l0": cache, "l1": own, "l2": cache}, memory, parts=[cache, own])


Row = Callable[[Device], Layout]
ROWS: list[Row] = [
    keys_and_values, values_of_another_size, latent, latent_with_indexer, quantised_indexer,
    keys_without_values, keys_and_values_of_two_types, pages_of_a_list, slices_of_one_tensor,
    convolution_and_state, padded_blocks,
    layers_outermost, latent_of_one_head, tokens_before_heads, layers_inside_a_block,
    heads_outermost, heads_around_layers, keys_then_values, states_in_padded_pages,
    blocks_split_by_the_kernel, blocks_split_without_a_page_size, more_rows_than_blocks,
    twice_as_many_rows_as_blocks, eight_bit_floats, eight_bit_integers, four_bits_and_scales,
    values_with_scales_beside, layers_that_share_a_cache,
]  # fmt: skip
# Those in which no byte belongs to nobody.
DENSE: list[Row] = [
    values_of_another_size, latent, latent_with_indexer, quantised_indexer, keys_without_values,
    keys_and_values_of_two_types, convolution_and_state, layers_outermost, latent_of_one_head,
    tokens_before_heads, layers_inside_a_block, heads_outermost, heads_around_layers,
    keys_then_values, blocks_split_by_the_kernel, blocks_split_without_a_page_size,
    eight_bit_floats, eight_bit_integers, layers_that_share_a_cache,
]  # fmt: skip


# ---- what is refused, and the words that must be said ------------------------------------------


def pages_of_a_list_with_an_overlay(device: Device) -> tuple[Layout, tuple[str, ...]]:
    """DeepSeek V4 on A5: a third view covers the first two."""
    usual = pages_of_a_list(device)
    raw = usual.memory.all[0]
    page = len(raw) // BLOCKS
    whole = view(raw, 0, (BLOCKS, page - 256), torch.uint8, (page, 1))
    tensors = {"l0": [*usual.tensors["l0"], whole]}
    return Layout(tensors, usual.memory), ("l0[0]", "l0[2]")


def layers_that_overlay_each_other(device: Device) -> tuple[Layout, tuple[str, ...]]:
    """Two layers of one storage, half a block apart."""
    memory = Memory(device)
    raw = memory.raw(BLOCKS * 1024 + 512)
    tensors = {f"l{at}": view(raw, at * 512, (BLOCKS, 1024), torch.int8) for at in range(2)}
    return Layout(tensors, memory), ("l0", "l1")


def blocks_that_overlap(device: Device) -> tuple[Layout, tuple[str, ...]]:
    memory = Memory(device)
    raw = memory.raw(BLOCKS * 1024 + 512)
    tensors = {"l0": view(raw, 0, (BLOCKS, 1024), torch.int8, (512, 1))}
    return Layout(tensors, memory), ("l0", "1024", "512")


def elements_apart(device: Device) -> tuple[Layout, tuple[str, ...]]:
    """A block of single elements with gaps between them."""
    memory = Memory(device)
    raw = memory.raw(BLOCKS * 1024)
    tensors = {"l0": view(raw, 0, (BLOCKS, 512), torch.int8, (1024, 2))}
    return Layout(tensors, memory), ("l0", "512")


def rows_that_fit_no_block(device: Device) -> tuple[Layout, tuple[str, ...]]:
    memory = Memory(device)
    return Layout({"l0": memory.own((BLOCKS + 1, 512), torch.int8)}, memory), ("l0", "9", "8")


def pages_larger_than_told(device: Device) -> tuple[Layout, tuple[str, ...]]:
    """More bytes in a block than the engine counts: what it counts lies elsewhere."""
    memory = Memory(device)
    tensors = {"l0": memory.own((BLOCKS, 1024), torch.int8)}
    return Layout(tensors, memory, pages=_same(["l0"], 512)), ("l0", "1024", "512")


Refused = Callable[[Device], tuple[Layout, tuple[str, ...]]]
REFUSED: list[Refused] = [
    pages_of_a_list_with_an_overlay, layers_that_overlay_each_other, blocks_that_overlap,
    elements_apart, rows_that_fit_no_block, pages_larger_than_told,
]  # fmt: skip
