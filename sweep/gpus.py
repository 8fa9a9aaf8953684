"""GPUs that trials may have, one each."""

import os
import subprocess
import sys
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def visible_gpus() -> list[str]:
    """Return the ids of the GPUs that a run would see, as CUDA_VISIBLE_DEVICES names them; empty without any.

    torch counts them in a process of its own: it takes seconds to import, and this process must not open a GPU.
    """
    if not any(path.exists() for path in DRIVERS):
        return []
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    count = int(done.stdout.strip() or 0) if done.returncode == 0 else 0
    named = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]
