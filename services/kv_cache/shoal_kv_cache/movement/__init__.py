"""Payloads on their way between tiers."""
