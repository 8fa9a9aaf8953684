"""DCNv2: main.py with configs/dcnv2.yaml."""

if __name__ == "__main__":
    # First, since the import of `main` takes a moment.
    from configs.stop_signals import end_at_once_on_signals

    end_at_once_on_signals()

    from main import command

    command("dcnv2")()
