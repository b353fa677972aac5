"""For people who write tiers: the contract as tests, and a tier that fails on command."""

from __future__ import annotations

import pytest

# Before the import, so that a failed assertion of the suite shows its values.
pytest.register_assert_rewrite("tierkv.testing.contract")

from tierkv.testing.contract import TierContract  # noqa: E402
from tierkv.testing.fault import FaultTier  # noqa: E402
from tierkv.testing.slots import aligned_views, fill_slot, name_of  # noqa: E402

__all__ = ["FaultTier", "TierContract", "aligned_views", "fill_slot", "name_of"]
