"""DLRM: main.py with configs/dlrm.yaml."""

if __name__ == "__main__":
    # First, since the import of `main` takes a moment.
    from configs.stop_signals import end_at_once_on_signals

    end_at_once_on_signals()

    from main import command

    command("dlrm")()
