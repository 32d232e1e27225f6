"""Other nodes: who lives, who owns what, and calls to them."""
