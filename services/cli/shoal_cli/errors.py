"""What ends a command with one line and exit status 2."""

from __future__ import annotations

REFUSAL = "shoal: "
"""What the line begins with."""


class CliError(Exception):
    """The command cannot be carried out; the text says why and what to do."""
