"""For people who write tiers and eviction policies: the contracts as tests, and a tier that fails.

The suites need pytest; they are classes to subclass.
"""

from __future__ import annotations

import pytest

# Before the imports, so that a failed assertion of a suite shows its values.
pytest.register_assert_rewrite("tierkv.testing.contract", "tierkv.testing.policy")

from tierkv.testing.contract import TierContract  # noqa: E402
from tierkv.testing.fault import FaultTier  # noqa: E402
from tierkv.testing.policy import PolicyContract  # noqa: E402
from tierkv.testing.slots import aligned_views, fill_slot, name_of  # noqa: E402

__all__ = ["FaultTier", "PolicyContract", "TierContract", "aligned_views", "fill_slot", "name_of"]
