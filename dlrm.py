"""DLRM: main.py with configs/dlrm.yaml."""

from main import command

if __name__ == "__main__":
    command("dlrm")()
