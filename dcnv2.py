"""DCNv2: main.py with configs/dcnv2.yaml."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # A `main.py` or a `configs` where the user works is not ours.
    if (ours := str(Path(__file__).resolve().parent)) != sys.path[0]:
        sys.path.insert(0, ours)
    # First, since the import of `main` takes a moment, and may find no library.
    from configs.messages import report_load_errors
    from configs.stop_signals import end_at_once_on_signals

    report_load_errors()
    end_at_once_on_signals()

    from main import command

    command("dcnv2")()
