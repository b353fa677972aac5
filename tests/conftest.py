"""Shared fixtures: small directories and blocks with readable names."""

from __future__ import annotations

import pytest

from tests.core_world import World


@pytest.fixture
def world() -> World:
    return World()
