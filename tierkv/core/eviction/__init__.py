"""Eviction policies: pure orders of rows, one file per policy."""
