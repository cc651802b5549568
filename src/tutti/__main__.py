"""`python -m tutti`: the same as the `tutti` command."""

from tutti.cli.main import app

if __name__ == "__main__":
    app()
