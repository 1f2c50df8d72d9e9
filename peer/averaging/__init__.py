"""The process that carries rounds out."""
