"""dilocox: volunteers train one language model together over ordinary internet links."""

__version__ = "0.1.0"
PROJECT_URL = ""  # where this program is had, as the status page names it; empty: nowhere yet
