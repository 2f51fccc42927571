"""Linear layers in (emulated) float8: how far they are from float32, which are taken, and that they learn.

Bounds: e4m3 keeps 3 bits of mantissa and rounds by at most 2^-4 of a value, e5m2 (tensorwise gradients) by 2^-3. A
product rounds two values, and a sum of products of independent errors is relatively no worse than one product.
"""

import sys

import pytest
import torch
from torch import nn

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.float8 import use_float8
from cosmos_rl_core.parallel.remat import checkpoint_activations
from doubles.ranks import run_ranks

pytest.importorskip("torchao")
pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own, about kernels it does not find on CPUs

CPU = torch.device("cpu")
RECIPES = ["tensorwise", "rowwise"]
E4M3, E5M2 = 2**-4, 2**-3


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 48), nn.SiLU(), nn.Linear(48, 1))


def rows():
    """Ragged on purpose: 37 rows."""
    inputs = torch.randn(37, 32, generator=torch.Generator().manual_seed(1))
    return inputs, inputs[:, :4].sum(-1, keepdim=True).tanh()


def backward(module):
    inputs, targets = rows()
    outputs = module(inputs)
    (outputs - targets).square().mean().backward()
    return outputs.detach(), {name: p.grad for name, p in module.named_parameters()}


def distance(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_layer_is_within_the_rounding_of_float8(recipe):
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Linear(64, 32, bias=False))
    rounded = nn.Sequential(nn.Linear(64, 32, bias=False))
    rounded.load_state_dict(exact.state_dict())
    use_float8(rounded, recipe, device=CPU)
    inputs, slopes = torch.randn(48, 64), torch.randn(48, 32)
    outputs = [module(inputs) for module in (exact, rounded)]
    assert 0 < distance(outputs[1], outputs[0]) < 2 * E4M3
    for output in outputs:
        (output * slopes).sum().backward()
    assert 0 < distance(rounded[0].weight.grad, exact[0].weight.grad) < E4M3 + E5M2


@pytest.mark.parametrize("recipe", RECIPES)
def test_float8_learns_as_float32_does(recipe):
    losses = {}
    for name in ("none", recipe):
        module = network()
        use_float8(module, name, device=CPU, skip=[module[4]])
        optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
        inputs, targets = rows()
        for _ in range(150):
            optimizer.zero_grad()
            loss = (module(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
        losses[name] = float(loss)
    untrained = float((network()(inputs) - targets).square().mean())
    assert losses["none"] < 0.01 * untrained
    assert losses[recipe] < 0.01 * untrained


def test_odd_and_skipped_layers_are_left_alone():
    module = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 40), nn.Linear(40, 32), nn.Linear(32, 64))
    assert use_float8(module, "tensorwise", device=CPU, skip=[module[3]]) == 1
    assert [type(layer).__name__ for layer in module] == ["Float8Linear", "Linear", "Linear", "Linear"]


def test_names_and_weights_stay_the_same():
    module = network()
    weights = dict(module.named_parameters())
    use_float8(module, "rowwise", device=CPU)
    found = dict(module.named_parameters())
    assert list(found) == list(weights)
    assert all(found[name] is weights[name] for name in weights)


def test_none_changes_nothing():
    module = network()
    assert use_float8(module, "none", device=CPU) == 0
    assert type(module[0]) is nn.Linear


def test_a_network_without_a_fitting_layer_is_refused():
    with pytest.raises(UserError, match="divisible by 16"):
        use_float8(nn.Sequential(nn.Linear(8, 8)), "rowwise", device=CPU)


def test_without_torchao_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UserError, match="pip install"):
        use_float8(network(), "rowwise", device=CPU)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputed_float8_gives_the_same_gradients(recipe, mode):
    results = []
    for remat in ("none", mode):
        module = network()
        use_float8(module, recipe, device=CPU)
        checkpoint_activations([module], remat)
        results.append(backward(module)[1])
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, msg=name)


def sharded(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    found = {}
    for recipe in RECIPES:
        module = network()
        use_float8(module, recipe, device=CPU)
        fully_shard(module, mesh=init_device_mesh("cpu", (world_size,)))
        found |= {f"{recipe}/{name}": gradient.full_tensor().numpy() for name, gradient in backward(module)[1].items()}
    return found


def test_sharded_float8_gives_the_same_gradients():
    found = run_ranks(sharded, 2)[1]  # both ranks have the same rows, and take the mean
    for recipe in RECIPES:
        module = network()
        use_float8(module, recipe, device=CPU)
        for name, gradient in backward(module)[1].items():
            result = torch.from_numpy(found[f"{recipe}/{name}"])
            torch.testing.assert_close(result, gradient, rtol=1e-5, atol=1e-6, msg=name)
