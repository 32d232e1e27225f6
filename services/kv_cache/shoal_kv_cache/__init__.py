"""Content-addressed KV blocks and window snapshots."""
