"""Raw logs, or the synthetic stream, to a dataset directory. No torch in here."""
