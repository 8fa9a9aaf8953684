"""Settings of all tests."""

import os

import torch

# Tests are small and often run in parallel; a second thread would only wait for the first.
torch.set_num_threads(1)

# Triton interprets kernels where there is no GPU. It reads the variable once, at import.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
