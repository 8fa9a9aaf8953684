"""Settings of torch in the caller's process that would change what a run computes."""

import torch


def check_torch_state(*, computes: bool = True, trains: bool = False) -> None:
    """Raise `ValueError` if the caller has set another dtype or device, autocast where a model `computes`, or no gradients."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    found = {
        f"torch.set_default_dtype({dtype})": dtype is not torch.float32,
        f"torch.set_default_device({device.type})": device.type != "cpu",
        "torch.autocast": computes and any(map(torch.is_autocast_enabled, ("cpu", "cuda"))),
        "torch.no_grad, inference_mode or set_grad_enabled(False)": trains
        and not torch.is_grad_enabled(),
    }
    for setting, is_set in found.items():
        if is_set:
            raise ValueError(
                f"{setting} is in force here, and would change what the run computes; leave it before this call (options such "
                "as device and train.amp choose for a run)"
            )
