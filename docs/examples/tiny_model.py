"""A transformer that is tiny but real, on a paged KV cache. It stands for your model.

Nothing here knows of TierKV. What matters is the memory: the KV of 16 tokens lies in one *device
block*, a sequence owns a list of them (its *block table*), and `forward` reads everything that came
before through that table. So a wrong block in the table, or wrong bytes in a block, give wrong
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

LAYERS = 3
HEADS = 4
HEAD_DIM = 16
WIDTH = HEADS * HEAD_DIM
VOCABULARY = 512

# Weights this large make attention decide what comes out. With the usual 0.02 a random model says
# nearly the same whatever is in its KV cache, and a comparison of outputs would prove nothing.
WEIGHTS_STD = 0.2

# A prefill that starts behind a cached prefix multiplies matrices of other shapes than a whole one,
# so the last bits differ. In float64 that never reaches the choice of a token.
DTYPE = torch.float64


def make_kv(blocks: int, block_tokens: int) -> dict[str, Tensor]:
    """The device memory: per layer a tensor (blocks, 2, block_tokens, heads, head_dim).

    Dimension 0 counts device blocks, and one block is contiguous: the form that TierKV asks for.
    """
    shape = (blocks, 2, block_tokens, HEADS, HEAD_DIM)
    return {f"layers.{layer}": torch.zeros(shape, dtype=DTYPE) for layer in range(LAYERS)}


class TinyModel:
    """Random weights, the same for the same seed on every machine."""

    def __init__(self, seed: int = 0) -> None:
        dice = torch.Generator().manual_seed(seed)

        def weights(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=dice, dtype=DTYPE) * WEIGHTS_STD

        self.embedding = weights(VOCABULARY, WIDTH)
        self.head = weights(WIDTH, VOCABULARY)
        self.layers = [
            {
                "qkv": weights(WIDTH, 3 * WIDTH),
                "out": weights(WIDTH, WIDTH),
                "up": weights(WIDTH, 2 * WIDTH),
                "down": weights(2 * WIDTH, WIDTH),
            }
            for _ in range(LAYERS)
        ]

    def forward(
        self, tokens: Sequence[int], start: int, table: Sequence[int], kv: Mapping[str, Tensor]
    ) -> Tensor:
        """Compute the KV of some tokens into their device blocks, and what comes next.

        Args:
            tokens: token ids at positions `start`, `start + 1`, ...
            start: how many tokens before them have their KV in the blocks of `table`.
            table: the device blocks of this sequence, in order, enough for all its tokens.
            kv: see `make_kv`; written to.
        Returns:
            Logits behind the last token, shape (VOCABULARY,).
        """
        block_tokens = kv["layers.0"].shape[2]
        blocks, end = torch.tensor(table), start + len(tokens)
        positions = torch.arange(start, end)
        page, place = blocks[positions // block_tokens], positions % block_tokens
        is_future = torch.arange(end) > positions[:, None]
        x = self.embedding[torch.tensor(tokens)]
        for weights, pages in zip(self.layers, kv.values(), strict=True):
            qkv = (_normed(x) @ weights["qkv"]).view(-1, 3, HEADS, HEAD_DIM)
            query, key, value = qkv.unbind(1)
            pages[page, 0, place] = _rotated(key, positions)
            pages[page, 1, place] = value
            keys, values = pages[blocks].transpose(0, 1).flatten(1, 2)[:, :end]
            scores = torch.einsum("qhd,khd->hqk", _rotated(query, positions), keys)
            scores = (scores / math.sqrt(HEAD_DIM)).masked_fill(is_future, -math.inf)
            seen = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
            x = x + seen.reshape(-1, WIDTH) @ weights["out"]
            x = x + silu(_normed(x) @ weights["up"]) @ weights["down"]
        return _normed(x[-1]) @ self.head


def _normed(x: Tensor) -> Tensor:
    """RMS norm: unit mean square over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding of x, shape (tokens, heads, head_dim)."""
    half = HEAD_DIM // 2
    speed = 10_000.0 ** (-torch.arange(half, dtype=DTYPE) / half)
    angle = (positions[:, None] * speed)[:, None, :]
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
