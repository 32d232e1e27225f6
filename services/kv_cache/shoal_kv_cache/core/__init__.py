"""Decisions of the KV cache. Pure: no I/O, no clock, no gRPC."""
