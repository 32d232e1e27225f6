"""Where payload bytes lie."""
