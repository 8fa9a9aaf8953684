import torch

from nn.layers.cross_net import CrossNet


def test_low_rank_layers_follow_the_paper():
    torch.manual_seed(0)
    net = CrossNet(6, 3, 2).double()
    x0 = torch.randn(4, 6, dtype=torch.float64)
    x = x0
    for layer in net.layers:
        layer.up.bias.data.normal_()
        u, v, b = layer.down.weight, layer.up.weight, layer.up.bias
        x = x0 * (x @ u.T @ v.T + b) + x
    torch.testing.assert_close(net(x0), x)


def test_full_rank_layers_have_one_square_weight():
    torch.manual_seed(0)
    net = CrossNet(6, 1, None).double()
    x0 = torch.randn(4, 6, dtype=torch.float64)
    (layer,) = net.layers
    layer.up.bias.data.normal_()
    assert [tuple(p.shape) for p in net.parameters()] == [(6, 6), (6,)]
    torch.testing.assert_close(net(x0), x0 * (x0 @ layer.up.weight.T + layer.up.bias) + x0)


def test_every_layer_sees_the_first_input_again():
    net = CrossNet(1, 2, None)
    for layer in net.layers:
        torch.nn.init.ones_(layer.up.weight)
    # x1 = x0^2 + x0 = 6, x2 = x0 x1 + x1 = 18; feeding x1 in for x0 would give 42
    assert net(torch.tensor([[2.0]])).item() == 18


def test_the_published_cross_network_has_its_size():
    with torch.device("meta"):
        net = CrossNet(3456, 3, 512)
    assert sum(p.numel() for p in net.parameters()) == 10_627_200


def test_initial_weights_are_cut_normals_and_biases_zero():
    net = CrossNet(256, 1, None)
    (layer,) = net.layers
    layer.initialise(torch.Generator().manual_seed(0))
    weight = layer.up.weight
    assert weight.abs().max().item() <= 0.1
    assert abs(weight.std().item() / (0.05 * 0.8796) - 1) < 0.01
    assert not layer.up.bias.any()


def test_mixed_dtypes_pass_under_autocast():
    net = CrossNet(8, 2, 4)
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(net(x).float(), net(x.bfloat16()).float(), rtol=0.05, atol=0.05)
