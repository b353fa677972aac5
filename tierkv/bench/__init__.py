"""Measuring. Every bench checks that what it measured was right, and says so."""
