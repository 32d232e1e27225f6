"""One module per API: the bytes of its answers, from what the recipe parsed."""
