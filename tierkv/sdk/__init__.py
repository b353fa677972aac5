"""The SDK: TierKV for engines of one's own.

An engine shows its KV memory to a `Cache`, asks it for blocks before it computes a prompt, and
hands over blocks that it has computed. Nothing here knows vLLM, and nothing here imports torch.
"""

from tierkv.sdk.aio import AsyncCache
from tierkv.sdk.cache import Cache
from tierkv.sdk.work import Copy, Hit

__all__ = ["AsyncCache", "Cache", "Copy", "Hit"]
