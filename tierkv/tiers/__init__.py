"""Secondary tiers below DRAM. None is there yet: DRAM is the only tier of this version."""
