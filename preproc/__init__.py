"""Conversion of raw logs, or of the synthetic stream, to a dataset directory. Nothing here imports torch."""
