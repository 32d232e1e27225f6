"""Generated from protos/shoal; see make proto."""
