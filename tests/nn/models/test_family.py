"""The models beside DLRM and DCNv2 against plain formulas: logits, gradients, sizes, padding, autocast and export."""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

from configs.schema import ModelConfig
from nn.layers.initialization import initialise_dense
from nn.layers.interactions.adaptive_mlp import Dice
from nn.layers.interactions.target_attention import TargetAttention
from nn.layers.pass_state import PassState, attach
from nn.layers.per_token import FIRST_STRENGTH, ReluRouter
from nn.models.autoint import AutoInt
from nn.models.deepfm import DeepFM
from nn.models.din import DIN
from nn.models.embedding_mlp import EmbeddingMLP
from nn.models.esmm import ESMM
from nn.models.fcn import FCN
from nn.models.finalmlp import FinalMLP
from nn.models.masknet import MaskNet
from nn.models.mmoe import MMoE
from nn.models.options import (
    AdaptiveActivation,
    AttentionPooling,
    AutoIntOptions,
    DeepFMOptions,
    DINOptions,
    EmbeddingMLPOptions,
    ESMMOptions,
    FCNOptions,
    FinalMLPOptions,
    MaskNetOptions,
    MaskStructure,
    MMoEOptions,
    PEPNetOptions,
    PLEOptions,
    RankMixerOptions,
    SharedBottomOptions,
    STAROptions,
    WideDeepOptions,
    WuKongOptions,
    XDeepFMOptions,
)
from nn.models.pepnet import PEPNet
from nn.models.ple import PLE
from nn.models.rankmixer import RankMixer
from nn.models.shared_bottom import SharedBottom
from nn.models.star import STAR
from nn.models.wide_deep import WideDeep
from nn.models.wukong import WuKong
from nn.models.xdeepfm import XDeepFM
from tests.helpers.gpus import needs_no_gpu, needs_one_gpu
from tests.helpers.specs import feature, sized_spec, spec_of
from tests.plain_models import PLAIN

B, N, F, D, L = 5, 3, 4, 6, 7
EVERY = [f"C{number}" for number in range(F)]
SPEC, WITHOUT_NUMBERS = sized_spec(N, F), sized_spec(0, F)


@dataclass(frozen=True, slots=True)
class Case:
    """A small model, the columns of its lookups, and the arguments of its plain formula."""

    name: str
    build: Any
    widths: list[int]
    plain: dict[str, Any] = field(default_factory=dict)
    num_numerical: int = N


def of_tasks(model: type, options: type[ModelConfig], num_tasks: int, **changes: Any):
    return lambda: model(
        options(embedding_dim=D, tower_hidden=[5], **changes), sized_spec(N, F, num_tasks)
    )


def masknet(structure: MaskStructure):
    options = MaskNetOptions(
        embedding_dim=D, structure=structure, blocks=[9, 8], reduction_ratio=1.5, hidden=[7]
    )
    return lambda: MaskNet(options, SPEC)


FINAL = FinalMLPOptions(
    embedding_dim=D,
    hidden_1=[9, 6],
    hidden_2=[8],
    gate_hidden=[5],
    gate_features_1=["I1", "C1"],
    heads=2,
)
WUKONG = WuKongOptions(
    embedding_dim=D,
    fm_vectors=2,
    linear_vectors=3,
    compression=3,
    fm_hidden=[7],
    numerical_hidden=[5],
    hidden=[9],
)
FULL_HISTORY = DINOptions(
    embedding_dim=D,
    attention_hidden=[9, 5],
    hidden=[8, 6],
    item_features=["item"],
    history_features=["items"],
    history_length=None,
)
DIN_OPTIONS = replace(
    FULL_HISTORY,
    item_features=["item", "kind"],
    history_features=["items", "kinds"],
    history_length="I1",
)
MIXER = RankMixerOptions(
    embedding_dim=D, tokens=4, token_dim=8, layers=2, expansion=3, tower_hidden=[5]
)
ITEM = (feature("item"), feature("items", hotness=L))
PAIRS = spec_of(
    *ITEM,
    feature("kind"),
    feature("kinds", hotness=L),
    feature("user"),
    numerical=("I0", "I1", "I2"),
)
EXPERTS = {"experts": 3, "expert_hidden": [8, 6]}
LEVELS = {"levels": 2, "task_experts": 2, "shared_experts": 3, "expert_hidden": [8, 6]}

STAR_OPTIONS = STAROptions(
    embedding_dim=D, domain="I1", domains=3, hidden=[7, 5], auxiliary_hidden=[6]
)
CASES = {
    "wide_deep": Case(
        "wide_deep",
        lambda: WideDeep(
            WideDeepOptions(
                embedding_dim=D,
                hidden=[9, 7],
                dropout=0,
                wide_features=["C0", "C1"],
                deep_features=EVERY,
            ),
            SPEC,
        ),
        [D] * F + [1, 1],
        {"num_wide": 2},
    ),
    "wide_deep with numbers": Case(
        "wide_deep",
        lambda: WideDeep(
            WideDeepOptions(
                embedding_dim=D,
                hidden=[9],
                dropout=0,
                wide_features=["C0"],
                deep_features=EVERY,
                wide_numerical=True,
            ),
            SPEC,
        ),
        [D] * F + [1],
        {"num_wide": 1},
    ),
    "wide_deep without numbers": Case(
        "wide_deep",
        lambda: WideDeep(WideDeepOptions(embedding_dim=D, hidden=[], dropout=0), WITHOUT_NUMBERS),
        [D] * F + [1] * F,
        {"num_wide": F},
        0,
    ),
    "deepfm": Case(
        "deepfm",
        lambda: DeepFM(DeepFMOptions(embedding_dim=D, hidden=[9, 7], dropout=0), SPEC),
        [D] * F + [1] * F,
    ),
    "deepfm without numbers": Case(
        "deepfm",
        lambda: DeepFM(DeepFMOptions(embedding_dim=D, hidden=[9], dropout=0), WITHOUT_NUMBERS),
        [D] * F + [1] * F,
        {},
        0,
    ),
    "embedding_mlp": Case(
        "embedding_mlp",
        lambda: EmbeddingMLP(
            EmbeddingMLPOptions(hidden=[9, 7], embedding_dims={"C0": 5, "C1": 7}), sized_spec(N, 2)
        ),
        [5, 7],
    ),
    "finalmlp": Case(
        "finalmlp",
        lambda: FinalMLP(FINAL, SPEC),
        [D] * F,
        {"gates": [[1, 4], []]},
    ),
    "serial masknet": Case("masknet", masknet(MaskStructure.serial), [D] * F, {"serial": True}),
    "parallel masknet": Case(
        "masknet", masknet(MaskStructure.parallel), [D] * F, {"serial": False}
    ),
    "wukong": Case("wukong", lambda: WuKong(WUKONG, SPEC), [D] * F),
    "wukong without numbers": Case(
        "wukong", lambda: WuKong(WUKONG, WITHOUT_NUMBERS), [D] * F, {}, 0
    ),
    "din": Case(
        "din",
        lambda: DIN(DIN_OPTIONS, PAIRS),
        [D, L * D, D, L * D, D],
        {"pairs": 2, "length": 1},
    ),
    **{
        f"din with a {pooling.value} of weights": Case(
            "din",
            functools.partial(DIN, replace(DIN_OPTIONS, attention_pooling=pooling), PAIRS),
            [D, L * D, D, L * D, D],
            {"pairs": 2, "length": 1, "pooling": pooling.value},
        )
        for pooling in (AttentionPooling.mean, AttentionPooling.softmax)
    },
    "din of full histories": Case(
        "din",
        lambda: DIN(FULL_HISTORY, spec_of(*ITEM, numerical=())),
        [D, L * D],
        {"pairs": 1, "length": None},
        0,
    ),
    "shared_bottom": Case(
        "shared_bottom",
        of_tasks(SharedBottom, SharedBottomOptions, 2, hidden=[9, 7]),
        [D] * F,
        {"tasks": 2},
    ),
    "mmoe": Case("mmoe", of_tasks(MMoE, MMoEOptions, 3, **EXPERTS), [D] * F, {"tasks": 3}),
    "mmoe of one task": Case(
        "mmoe", of_tasks(MMoE, MMoEOptions, 1, **EXPERTS), [D] * F, {"tasks": 1}
    ),
    "ple": Case("ple", of_tasks(PLE, PLEOptions, 2, **LEVELS), [D] * F, {"tasks": 2}),
    "rankmixer": Case("rankmixer", lambda: RankMixer(MIXER, SPEC), [D] * F),
    "rankmixer of ordered features": Case(
        "rankmixer",
        lambda: RankMixer(
            replace(MIXER, feature_order=["C3", "I1", "I0", "I2", "C0", "C2", "C1"]),
            sized_spec(N, F, 2),
        ),
        [D] * F,
        {"tasks": 2, "order": [6, 1, 0, 2, 3, 5, 4]},
    ),
    "fcn": Case(
        "fcn",
        lambda: FCN(
            FCNOptions(
                embedding_dim=D,
                deep_layers=2,
                shallow_layers=3,
                deep_dropout=0,
                shallow_dropout=0,
            ),
            SPEC,
        ),
        [D] * F,
    ),
    "autoint": Case(
        "autoint",
        lambda: AutoInt(
            AutoIntOptions(embedding_dim=D, layers=2, heads=2, head_dim=4, hidden=[7]), SPEC
        ),
        [D] * F,
        {"heads": 2},
    ),
    "xdeepfm": Case(
        "xdeepfm",
        lambda: XDeepFM(XDeepFMOptions(embedding_dim=D, cross_layers=[5, 4], hidden=[7]), SPEC),
        [D] * F + [1] * F,
    ),
    "xdeepfm without numbers": Case(
        "xdeepfm",
        lambda: XDeepFM(
            XDeepFMOptions(embedding_dim=D, cross_layers=[5], hidden=[]), WITHOUT_NUMBERS
        ),
        [D] * F + [1] * F,
        {},
        0,
    ),
    "esmm": Case("esmm", of_tasks(ESMM, ESMMOptions, 2), [D] * F, {"tasks": 2}),
    "pepnet": Case(
        "pepnet",
        lambda: PEPNet(
            PEPNetOptions(
                embedding_dim=D,
                domain_features=["C1"],
                prior_features=["C3", "C0"],
                tower_hidden=[7, 5],
            ),
            sized_spec(N, F, 2),
        ),
        [D] * F,
        {"tasks": 2, "domain": [1], "prior": [3, 0]},
    ),
    "star": Case(
        "star",
        lambda: STAR(
            STAR_OPTIONS,
            sized_spec(N, F, 2),
        ),
        [D] * F,
        {"tasks": 2, "domain": 1},
    ),
    "cgc": Case(
        "ple", of_tasks(PLE, PLEOptions, 2, **{**LEVELS, "levels": 1}), [D] * F, {"tasks": 2}
    ),
}


DICE = Case(
    "din",
    lambda: DIN(replace(DIN_OPTIONS, activation=AdaptiveActivation.dice), PAIRS),
    [D, L * D, D, L * D, D],
    {"pairs": 2, "length": 1},
)


EXPERT_MIXER = replace(MIXER, experts=3)
MIXTURE = Case(
    "rankmixer",
    lambda: RankMixer(EXPERT_MIXER, SPEC),
    [D] * F,
    {"experts": 3},
)


def built(case: Case) -> nn.Module:
    """Return a model whose parameters all matter: those that begin at zero are drawn too."""
    torch.manual_seed(0)
    model = case.build()
    initialise_dense(model, 1)
    state = PassState(1, torch.device("cpu"))
    attach(model, state)
    state.set(0, B, B, B)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.5)
    return model


def inputs_of(case: Case, size: int = B) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    numerical = torch.randn(size, case.num_numerical, generator=generator)
    if case.plain.get("length") is not None:
        numerical[:, case.plain["length"]] = torch.tensor([0, L, 1, 4, 2] * 9)[:size].float()
    if case.name == "star":
        numerical[:, case.plain["domain"]] = torch.tensor([0, 2, 0, 1, 2, 2, 0] * 9)[:size].float()
    return numerical, [torch.randn(size, width, generator=generator) for width in case.widths]


@pytest.mark.parametrize("case", [*CASES.values(), DICE, MIXTURE], ids=[*CASES, "dice", "mixture"])
def test_logits_and_gradients_equal_the_plain_formula(case):
    model = built(case).double()
    numerical, lookups = inputs_of(case)
    numerical = numerical.double()
    lookups = [lookup.double().requires_grad_() for lookup in lookups]
    parameters = dict(model.named_parameters())
    logits = model(numerical, torch.cat(lookups, 1))
    wanted = PLAIN[case.name](parameters, numerical, lookups, **case.plain)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits.double(), wanted, rtol=1e-6, atol=1e-6)

    weights = torch.randn(logits.shape, dtype=torch.float64)
    leaves = [*parameters.values(), *lookups]
    gradients = torch.autograd.grad((logits.double() * weights).sum(), leaves)
    expected = torch.autograd.grad((wanted * weights).sum(), leaves)
    names = [*parameters, *(f"lookup {number}" for number in range(len(lookups)))]
    for name, gradient, right in zip(names, gradients, expected, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-6, atol=1e-6, msg=f"gradient of {name}")
        assert right.any() or "attention.layers.2.bias" in name, f"{name} is not used"


def test_a_row_of_an_unknown_domain_has_no_score():
    model = built(CASES["star"]).eval()
    numerical, lookups = inputs_of(CASES["star"])
    numerical[1, 1], numerical[3, 1] = 3, 0.5
    is_lost = model(numerical, torch.cat(lookups, 1)).isnan()
    assert is_lost.tolist() == [[False] * 2, [True] * 2, [False] * 2, [True] * 2, [False] * 2]


def check_networks_of_domains(device: str, tasks: int, monkeypatch) -> None:
    """Logits and gradients of domains' networks by the kernels of MLPs are those of batched products, with dropout too."""
    torch.set_float32_matmul_precision("highest")
    options = replace(STAR_OPTIONS, dropout=0.3)
    case = Case("star", lambda: STAR(options, sized_spec(N, F, tasks)), [D] * F, {"domain": 1})
    model = built(case).to(device)
    state = PassState(1, torch.device(device))
    attach(model, state)
    state.set(3, B, B, B)
    numerical, lookups = inputs_of(case)
    numerical[1, 1] = numerical[4, 1] = 1  # the domain without a row of `inputs_of`
    embeddings, results = torch.cat(lookups, 1).to(device).requires_grad_(), []
    for fused in (True, False):
        monkeypatch.setattr("nn.models.star.can_fuse", lambda *_, fused=fused: fused)
        logits = model(numerical.to(device), embeddings)
        assert logits.dtype is torch.float32
        weights = torch.arange(1.0, 1 + logits.numel(), device=device).view_as(logits)
        leaves = [embeddings, *model.parameters()]
        results.append([logits, *torch.autograd.grad((logits * weights).sum(), leaves)])
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-4)


@needs_no_gpu
@pytest.mark.parametrize("tasks", [1, 2])
def test_interpreted_networks_of_domains_equal_the_batched_ones(tasks, monkeypatch):
    check_networks_of_domains("cpu", tasks, monkeypatch)


@needs_one_gpu
@pytest.mark.parametrize("tasks", [1, 2])
def test_on_a_gpu_networks_of_domains_equal_the_batched_ones(tasks, monkeypatch):
    check_networks_of_domains("cuda", tasks, monkeypatch)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_initial_weights_depend_on_the_seed_alone(case):
    torch.manual_seed(7)
    first = case.build()
    torch.manual_seed(7)
    second = case.build()
    initialise_dense(first, 3)
    torch.randn(5)
    initialise_dense(second, 3)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bf16_autocast_gives_float32_logits_close_to_the_exact_ones(case):
    model = built(case)
    numerical, lookups = inputs_of(case)
    wanted = model(numerical, torch.cat(lookups, 1))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(numerical, torch.cat(lookups, 1))
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, wanted, rtol=0.1, atol=0.2)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.doors
def test_the_dense_component_exports_for_any_batch_size(case):
    model = built(case).eval()
    any_size = {0: torch.export.Dim("batch")}
    numerical, lookups = inputs_of(case)
    example = (numerical, torch.cat(lookups, 1))
    exported = torch.export.export(model, example, dynamic_shapes=(any_size, any_size)).module()
    numerical, lookups = inputs_of(case, 9)
    others = (numerical, torch.cat(lookups, 1))
    torch.testing.assert_close(exported(*others), model(*others))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.doors
def test_the_dense_component_compiles_without_a_graph_break(case):
    torch.compiler.reset()
    model = built(case)
    numerical, lookups = inputs_of(case)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    arguments = (numerical, torch.cat(lookups, 1))
    torch.testing.assert_close(compiled(*arguments), model(*arguments))


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if "pairs" in case.plain][:3]
)
def test_padded_positions_of_a_history_are_not_read(name):
    case = CASES[name]
    model = built(case)
    numerical, lookups = inputs_of(case)
    wanted = model(numerical, torch.cat(lookups, 1))
    lengths = numerical[:, 1].long()
    for history in (lookups[1], lookups[3]):
        positions = history.view(B, L, D)
        for row, length in enumerate(lengths):
            positions[row, length:] = float("nan")
    embeddings = torch.cat(lookups, 1).requires_grad_()
    logits = model(numerical, embeddings)
    assert torch.equal(logits, wanted)
    logits.sum().backward()
    gradients = embeddings.grad.split(case.widths, 1)
    for gradient in (gradients[1], gradients[3]):
        for row, length in enumerate(lengths):
            assert not gradient.view(B, L, D)[row, length:].any()
            assert gradient.view(B, L, D)[row, :length].any(1).all()


def test_a_history_begins_without_a_common_weight():
    attention = TargetAttention(D, L, [9, 5])
    initialise_dense(attention, 1)
    assert attention.layers[0].bias.all()
    attention.layers[-1].weight.data.zero_()
    item, history = torch.randn(B, D), torch.randn(B, L, D)
    assert not attention(item, history, torch.full((B,), L)).any()


def test_fewer_positions_are_as_a_shorter_history():
    case = CASES["din"]
    options = replace(DIN_OPTIONS, history_positions=3)
    model, long = DIN(options, PAIRS), built(case)
    model.load_state_dict(long.state_dict())
    numerical, lookups = inputs_of(case)
    x = torch.cat(lookups, 1)
    logits = model(numerical, x)
    numerical[:, 1].clamp_(max=3)
    torch.testing.assert_close(logits, long(numerical, x))


def test_dice_is_evaluated_with_running_statistics():
    layer = Dice(3)
    state = PassState(1, torch.device("cpu"))
    attach(layer, state)
    x = torch.randn(40, 3) * 2 + 1
    state.set(0, 40, 40, 40)
    for _ in range(400):
        layer(x)
        layer.norm.update()
    assert [name for name, _ in layer.named_parameters()] == ["alpha"]
    layer.eval()
    chance = torch.sigmoid((x - x.mean(0)) / x.std(0))
    torch.testing.assert_close(layer(x), x * chance, rtol=1e-5, atol=1e-5)


def test_a_mixture_is_evaluated_with_the_sparse_router_alone():
    model = built(MIXTURE).double().eval()
    numerical, lookups = (x.double() if torch.is_tensor(x) else x for x in inputs_of(MIXTURE))
    lookups = [lookup.double() for lookup in lookups]
    wanted = PLAIN["rankmixer"](
        dict(model.named_parameters()), numerical, lookups, experts=3, training=False
    )
    logits = model(numerical, torch.cat(lookups, 1)).double()
    torch.testing.assert_close(logits, wanted, rtol=1e-6, atol=1e-6)


def test_the_penalty_drives_the_share_of_open_gates_of_valid_rows():
    router = ReluRouter(2, 4, 3, active=0.5)
    state = PassState(1, torch.device("cpu"))
    attach(router, state)
    x = torch.randn(2, 6, 4)
    state.set(0, 6, 4, 8)  # two of the rows are padding; eight over all ranks
    router(x)
    gates = router.eval()(x)[:, :4]
    torch.testing.assert_close(router.penalty(), FIRST_STRENGTH * gates.sum() / 8)
    for share, factor in ((0.6, 1.2), (0.4, 1 / 1.2), (0.5, 1)):
        router.strength.fill_(1)
        router._open.fill_(share)
        router.update()
        assert router.strength.item() == pytest.approx(factor)


def test_the_published_size_has_a_hundred_million_parameters():
    options = RankMixerOptions(embedding_dim=16, tokens=16, token_dim=768, expansion=3)
    with torch.device("meta"):
        model = RankMixer(options, sized_spec(13, 26))
    assert 100e6 < model.num_parameters() < 120e6


@pytest.mark.parametrize("structure", MaskStructure)
def test_masknet_drops_after_serial_blocks_or_after_hidden_layers(structure):
    options = MaskNetOptions(embedding_dim=D, structure=structure, blocks=[9, 8], hidden=[7])
    plain = MaskNet(options, SPEC)
    model = MaskNet(replace(options, dropout=0.5), SPEC)
    model.load_state_dict(plain.state_dict())
    state = PassState(3, torch.device("cpu"))
    attach(model, state)
    state.set(0, 40, 40, 40)
    vectors = torch.randn(40, (N + F) * D)
    is_serial = structure is MaskStructure.serial
    for block, same in zip(model.blocks, plain.blocks, strict=True):
        inputs = torch.randn(40, block.projection.layers[0].out_features)
        wanted, dropped = same(vectors, inputs), block(vectors, inputs)
        is_kept = dropped == (2 if is_serial else 1) * wanted
        assert bool((is_kept | (dropped == 0)).all())
        assert bool(is_kept.all()) != is_serial
    assert len(model.top.dropouts) == (not is_serial)


def test_the_length_of_a_history_is_no_input_of_the_mlp():
    case = CASES["din of full histories"]
    model = DIN(replace(FULL_HISTORY, history_length="I0"), spec_of(*ITEM, numerical=("I0",)))
    model.load_state_dict(built(case).state_dict())
    numerical, lookups = inputs_of(case)
    x = torch.cat(lookups, 1)
    full = torch.full((B, 1), float(L))
    torch.testing.assert_close(model(full, x), built(case)(numerical, x))
