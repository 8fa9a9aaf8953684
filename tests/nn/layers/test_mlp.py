import math

import torch

from nn.layers.mlp import MLP


def num_parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_thirteen_inputs_become_sixteen_as_in_the_published_bottom_mlp():
    mlp = MLP(13, [512, 256, 128], final_activation=True)
    assert mlp.layers[0].in_features == 16
    assert num_parameters(mlp) == 172_928


def test_padded_columns_do_not_change_the_result():
    mlp = MLP(3, [5, 2], final_activation=False)
    x = torch.randn(4, 3)
    first, second = mlp.layers
    hidden = (x @ first.weight[:, :3].T + first.bias).clamp(min=0)
    torch.testing.assert_close(mlp(x), hidden @ second.weight.T + second.bias)


def test_aligned_input_is_not_padded():
    assert MLP(480, [1], final_activation=False).layers[0].in_features == 480


def test_relu_after_the_last_layer_is_a_choice():
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    plain = MLP(8, [8], final_activation=False)
    rectified = MLP(8, [8], final_activation=True)
    rectified.load_state_dict(plain.state_dict())
    assert plain(x).min() < 0
    torch.testing.assert_close(rectified(x), plain(x).clamp(min=0))


def test_initial_kernels_are_glorot_normal_cut_at_two_deviations():
    mlp = MLP(512, [512], final_activation=True)
    mlp.initialise(torch.Generator().manual_seed(0))
    kernel, wanted = mlp.layers[0].weight, math.sqrt(2 / 1024)
    assert abs(kernel.std().item() / wanted - 1) < 0.01
    assert abs(kernel.mean().item()) < 0.01 * wanted
    assert 2.2 * wanted < kernel.abs().max().item() <= 2 * wanted / 0.8796


def test_initial_biases_are_normal_with_the_inverse_root_of_the_outputs():
    mlp = MLP(8, [4096], final_activation=True)
    mlp.initialise(torch.Generator().manual_seed(0))
    assert abs(mlp.layers[0].bias.std().item() * math.sqrt(4096) - 1) < 0.03
