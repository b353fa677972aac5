"""Secondary tiers below the DRAM pool: the contract, and the stores that fulfil it."""

from __future__ import annotations

from tierkv.plugins import load_tier
from tierkv.tiers.base import Tier, TierSettings


def open_tier(settings: TierSettings) -> Tier:
    """Open the store of a tier. Blocks; call it inside the tier's I/O process.

    Raises:
        ConfigError: the settings name nothing usable; says what to do.
        TierUnavailableError: the store does not answer now; trying again may help.
    """
    match settings.type:
        case "memory":
            from tierkv.tiers.memory import MemoryTier

            return MemoryTier(settings)
        case "fs":
            from tierkv.tiers.fs.tier import FsTier

            return FsTier(settings)
        case "object":
            from tierkv.tiers.object_store import ObjectStoreTier

            return ObjectStoreTier(settings)
        case _:
            return load_tier(settings)
