"""The SSD tier: one file per block below a directory; see `tierkv.tiers.fs.tier`."""
