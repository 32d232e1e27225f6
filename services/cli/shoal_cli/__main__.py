"""`python -m shoal_cli` is the `shoal` command."""

from shoal_cli.main import entry

if __name__ == "__main__":
    entry()
