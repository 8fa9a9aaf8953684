"""DCNv2: main.py with configs/dcnv2.yaml."""

from main import launch

if __name__ == "__main__":
    launch("dcnv2")
