"""One replica of the model: its stages, the links between them, how it forms and how it heals."""
