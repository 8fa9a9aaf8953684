"""A server in a process of its own, and a request of `ROWS` rows for it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from serving.manifest import Manifest

ROWS = 32
READY = re.compile(r"on http://127\.0\.0\.1:(\d+)")


def start(root: Path) -> tuple[subprocess.Popen, int]:
    """Start the server; return its process and port."""
    command = [sys.executable, "-m", "serving.run", f"model={root}", "port=0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    found = READY.search(line)
    if found is None:
        process.kill()
        raise RuntimeError(f"the server ends: {line}")
    return process, int(found[1])


def request_of(manifest: Manifest) -> tuple[str, bytes, int]:
    """Return the name of a model, and the body of a request with the length of its JSON."""
    generator = np.random.default_rng(1)
    highest = [f.cardinality for f in manifest.fixed for _ in range(f.hotness or 0)]
    arrays = {
        "numerical": generator.normal(size=(ROWS, len(manifest.numerical))).astype("<f4"),
        "ids": generator.integers(0, highest, (ROWS, len(highest))).astype("<i4"),
    }
    arrays |= {
        f.name: generator.integers(0, f.cardinality, (ROWS, 2), "<i4") for f in manifest.ragged
    }
    entries = [
        {
            "name": name,
            "datatype": "FP32" if name == "numerical" else "INT32",
            "shape": list(array.shape),
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in arrays.items()
    ]
    head = json.dumps({"inputs": entries, "parameters": {"binary_data_output": True}}).encode()
    return manifest.name, head + b"".join(a.tobytes() for a in arrays.values()), len(head)
