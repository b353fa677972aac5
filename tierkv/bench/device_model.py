"""A small decoder with a paged KV cache, in torch alone: the model of ``tierkv bench device``.

Random weights; what it says means nothing. What matters is that its attention reads its keys and
values through a block table, and that a token's output depends on those of all tokens before it.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from tierkv.bench.device_plan import ModelShape

SEED = 11


class PagedModel:
    """The decoder and its KV memory.

    Attributes:
        kv: layer name -> shape (blocks, 2, block_tokens, kv_heads, head_dim): keys, then values.
    """

    def __init__(self, device: torch.device, shape: ModelShape, blocks: int) -> None:
        self.shape = shape
        self._device = device
        self._dtype = getattr(torch, shape.dtype)
        self._dice = torch.Generator().manual_seed(SEED)
        own, shared = shape.hidden, shape.kv_heads * shape.head_dim
        sides = {
            "query": (own, own), "key": (own, shared), "value": (own, shared), "out": (own, own),
            "up": (own, shape.mlp), "down": (shape.mlp, own),
        }  # fmt: skip
        self._layers = [
            {name: self._random(*side) / side[0] ** 0.5 for name, side in sides.items()}
            for _ in range(shape.layers)
        ]
        page = (2, shape.block_tokens, shape.kv_heads, shape.head_dim)
        self.kv = {
            f"layer{at}": torch.zeros(blocks, *page, dtype=self._dtype, device=device)
            for at in range(shape.layers)
        }

    def make_inputs(self, tokens: int, start: int) -> torch.Tensor:
        """Random embeddings of tokens at positions from `start`, shape (tokens, hidden)."""
        half = self.shape.hidden // 2
        rates = 10_000.0 ** (-torch.arange(half) / half)
        angles = torch.arange(start, start + tokens)[:, None] * rates
        positions = torch.cat([angles.sin(), angles.cos()], dim=1)
        return self._random(tokens, self.shape.hidden) + positions.to(self._device, self._dtype)

    def forward(self, hidden: torch.Tensor, table: torch.Tensor, start: int) -> torch.Tensor:
        """Compute tokens whose predecessors are in the KV cache, and put theirs into it.

        Args:
            hidden: inputs, shape (tokens, hidden).
            table: block ids of the request in order, shape (blocks,); enough for these tokens.
            start: position of the first one.
        Returns:
            Outputs, shape (tokens, hidden), of root mean square 1.
        """
        size, end = self.shape.block_tokens, start + len(hidden)
        at = torch.arange(start, end, device=self._device)
        places = table[at // size], at % size
        used = table[: -(-end // size)]
        mask = torch.arange(end, device=self._device)[None, :] <= at[:, None]
        for weights, kv in zip(self._layers, self.kv.values(), strict=True):
            seen = {"places": places, "used": used, "mask": mask}
            hidden = hidden + self._attend(weights, kv, _normed(hidden), **seen)
            hidden = hidden + silu(_normed(hidden) @ weights["up"]) @ weights["down"]
        return _normed(hidden)

    def _attend(
        self,
        weights: dict[str, torch.Tensor],
        kv: torch.Tensor,
        hidden: torch.Tensor,
        *,
        places: tuple[torch.Tensor, torch.Tensor],
        used: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        shape, (tokens, end) = self.shape, mask.shape
        blocks, offsets = places
        for side, name in enumerate(("key", "value")):
            heads = (hidden @ weights[name]).view(tokens, shape.kv_heads, shape.head_dim)
            kv[blocks, side, offsets] = heads
        pages = kv[used]
        keys, values = (
            pages[:, side]
            .reshape(-1, shape.kv_heads, shape.head_dim)[:end]
            .transpose(0, 1)
            .repeat_interleave(shape.heads // shape.kv_heads, 0)[None]
            for side in (0, 1)
        )
        queries = (hidden @ weights["query"]).view(tokens, shape.heads, -1).transpose(0, 1)[None]
        found = scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return found[0].transpose(0, 1).reshape(tokens, -1) @ weights["out"]

    def _random(self, *sides: int) -> torch.Tensor:
        """Normal numbers, equal on every device."""
        return torch.randn(*sides, generator=self._dice).to(self._device, self._dtype)


def _normed(hidden: torch.Tensor) -> torch.Tensor:
    wide = hidden.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(hidden.dtype)
