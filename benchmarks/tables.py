"""How wide tables of the benchmarks look: narrow, so that they fit into 80 columns."""

from rich.box import SIMPLE_HEAD
from rich.table import Table


def narrow(title: str | None = None) -> Table:
    """An empty table with only a space between its columns."""
    return Table(title=title, box=SIMPLE_HEAD, padding=0, show_edge=False)
