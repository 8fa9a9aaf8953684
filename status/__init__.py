import sys
from pathlib import Path

if sys.argv[:1] == ["-m"]:  # until Python has found the module of `python -m`
    # A `configs` where the user works is not ours.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    # First, since the other imports may find no library.
    from configs.messages import report_load_errors

    report_load_errors()
