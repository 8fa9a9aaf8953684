"""What every test starts from."""

import torch

# Tests are small and often run beside each other; a second thread only waits for the first.
torch.set_num_threads(1)
