"""DLRM: main.py with configs/dlrm.yaml."""

from main import launch

if __name__ == "__main__":
    launch("dlrm")
