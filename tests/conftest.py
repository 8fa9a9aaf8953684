"""What every test starts from."""

import os

import torch

# Tests are small and often run beside each other; a second thread only waits for the first.
torch.set_num_threads(1)

# Where no GPU compiles the kernels, Triton interprets them; it reads this once, when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
