"""Encoder passes over prompts, bounded replay and KV export."""
