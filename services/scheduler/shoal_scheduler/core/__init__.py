"""The scheduler's decisions: no I/O, no clock, no randomness."""
