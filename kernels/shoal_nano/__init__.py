"""The nano model: its text, its training, its checkpoint."""
