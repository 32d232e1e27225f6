"""Continuous batching, drafting, verification and all sampling."""
