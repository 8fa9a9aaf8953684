"""DCNv2: main.py with configs/dcnv2.yaml."""

from main import command

if __name__ == "__main__":
    command("dcnv2")()
