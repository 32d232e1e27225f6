"""Admission at the edge: who asks, within which limits, and what it used."""
