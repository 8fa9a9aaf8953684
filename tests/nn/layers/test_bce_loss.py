"""A rank's share of the loss: in plain torch, and the fused kernel beside it."""

import pytest
import torch

from nn.layers.bce_loss import bce_loss_share, unit_gradient
from tests.helpers.gpus import needs_no_gpu


def test_shares_add_up_to_the_mean_over_the_rows_that_count():
    torch.manual_seed(0)
    logits, labels = torch.randn(10), torch.randint(0, 2, (10,)).float()
    whole = torch.nn.functional.binary_cross_entropy_with_logits(logits[:7], labels[:7])
    shares = [
        bce_loss_share(logits[:5], labels[:5], 5, 7),
        bce_loss_share(logits[5:], labels[5:], 2, 7),
    ]
    torch.testing.assert_close(sum(shares), whole)


def compare(device: str) -> None:
    from nn.ops.triton.bce_loss import fused_bce_loss_share

    torch.manual_seed(0)
    # Logits so large that exp would overflow, and rows that do not count.
    logits = torch.cat([torch.randn(2000) * 5, torch.tensor([200.0, -200.0, 0.0])])
    labels = torch.randint(0, 2, (2003,)).float()
    logits[-1] = float("nan")
    results = []
    for function, where in ((bce_loss_share, "cpu"), (fused_bce_loss_share, device)):
        leaf = logits.to(where, copy=True).requires_grad_()
        share = function(leaf, labels.to(where), 2002, 9000)
        (share * 3).backward()
        results.append((share.detach().cpu(), leaf.grad.cpu()))
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=2e-6, atol=1e-9)
    unit = unit_gradient(torch.device(device))
    gradients = []
    for first in (unit, unit.clone()):
        leaf = logits.to(device, copy=True).requires_grad_()
        fused_bce_loss_share(leaf, labels.to(device), 2002, 9000, unit).backward(first)
        gradients.append(leaf.grad)
    assert torch.equal(*gradients), (
        "a factor of 1 changes nothing, whether it is multiplied by or not"
    )
    assert fused_bce_loss_share(logits.to(device), labels.to(device), 2003, 9000).isnan(), (
        "a row that is no number must show"
    )


@needs_no_gpu
def test_the_interpreted_loss_equals_plain_torch():
    compare("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_fused_loss_equals_plain_torch_on_a_gpu():
    compare("cuda")
