"""Generated tasks: one generator and one checker per family, split into training and held-out by content."""

from shoal_nano.tasks.families import CHECKED_FAMILIES, FAMILIES, check, held_out_items, make_item
from shoal_nano.tasks.item import Item

__all__ = ["CHECKED_FAMILIES", "FAMILIES", "Item", "check", "held_out_items", "make_item"]
