"""Products through oneDNN are torch's products: same values, same gradients, only the library differs."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cosmos_rl_core.parallel.axes import linear
from cosmos_rl_core.parallel.axes.linear import OneDnnLinear, SteadyLinear, product, use_onednn

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@needs_onednn
@pytest.mark.parametrize("rows", [(1,), (5,), (3, 70)])
@pytest.mark.parametrize("out", [130, 192])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("is_faster", "with_gradients"), [(False, False), (True, False), (True, True)])
def test_values_and_gradients_are_those_of_float64(rows, out, bias, is_faster, with_gradients, monkeypatch):
    wins = {"outputs": is_faster, "gradients": with_gradients}
    monkeypatch.setattr(linear, "_wins", lambda kind, *_: wins[kind])
    monkeypatch.setattr(linear, "MIN_WORK", 0)
    input, weight = drawn(*rows, 160).requires_grad_(), drawn(out, 160, seed=1).requires_grad_()
    offset = drawn(out, seed=2).requires_grad_() if bias else None
    inputs = [x for x in (input, weight, offset) if x is not None]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    output, wanted = product(*inputs), F.linear(*exact)
    assert ("Product" in type(output.grad_fn).__name__) == is_faster
    slope = drawn(*output.shape, seed=3)
    torch.testing.assert_close(output, wanted.float(), rtol=1e-5, atol=1e-4)
    found = torch.autograd.grad(output, inputs, slope)
    for gradient, right in zip(found, torch.autograd.grad(wanted, exact, slope.double()), strict=True):
        torch.testing.assert_close(gradient, right.float(), rtol=1e-5, atol=1e-4)


@needs_onednn
@pytest.mark.parametrize(("rows", "many_rows", "is_onednn"), [(64, False, False), (256, False, True), (64, True, True)])
def test_a_small_product_in_training_is_torchs_unless_many_rows_share_a_kernel(rows, many_rows, is_onednn, monkeypatch):
    monkeypatch.setattr(linear, "_wins", lambda *_: True)
    output = product(drawn(rows, 160), drawn(192, 160, seed=1).requires_grad_(), many_rows=many_rows)
    assert ("Product" in type(output.grad_fn).__name__) == is_onednn


@needs_onednn
def test_rows_do_not_depend_on_their_neighbours():
    input, weight = drawn(64, 160), drawn(192, 160, seed=1)
    whole = product(input, weight)
    assert all(torch.equal(product(input[:rows], weight), whole[:rows]) for rows in (2, 7, 33))


@needs_onednn
def test_a_model_keeps_its_names_and_weights():
    model = nn.Sequential(nn.Linear(160, 192), nn.ReLU(), nn.Linear(192, 130, bias=False))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wanted = model(drawn(4, 160))
    use_onednn(model)
    assert [type(layer) for layer in model] == [OneDnnLinear, nn.ReLU, OneDnnLinear]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(model(drawn(4, 160)), wanted, rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("width", [48, 160])
def test_a_layer_that_generates_gives_a_row_the_same_bits_in_any_batch(width):
    layer = nn.Linear(width, width)
    use_onednn(layer, generates=True)
    assert type(layer) is SteadyLinear
    input = drawn(40, width)
    with torch.no_grad():
        whole = layer(input)
        torch.testing.assert_close(whole, F.linear(input, layer.weight, layer.bias))
        assert torch.equal(whole, product(input, layer.weight, layer.bias))
        assert all(torch.equal(layer(input[:rows]), whole[:rows]) for rows in (4, 7, 33))


def test_other_types_take_the_ordinary_product():
    layer = nn.Linear(160, 192, dtype=torch.bfloat16)
    use_onednn(layer)
    use_onednn(layer, generates=True)
    assert type(layer) is nn.Linear
    input = drawn(4, 160).bfloat16()
    assert torch.equal(product(input, layer.weight, layer.bias), layer(input))


@needs_onednn
@pytest.mark.parametrize("width", [64, 160])
def test_with_many_rows_a_layer_has_the_same_bits_with_and_without_gradients(width):
    layer = nn.Linear(width, width)
    use_onednn(layer, many_rows=True)
    input = drawn(300, width)
    with torch.no_grad():
        alone = layer(input[:100])
    trained = layer(input)
    assert trained.requires_grad
    assert torch.equal(alone, trained[:100])


GROWTH = """
import sys
import torch
from cosmos_rl_core.parallel.axes.linear import bound_caches

def kibibytes():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

if sys.argv[1] == "bounded":
    bound_caches(16)
weight = torch.zeros(256, 256)
product = lambda rows: torch.ops.mkldnn._linear_pointwise(torch.zeros(rows, 256), weight, None, "none", [], "")
for rows in range(100, 132):
    product(rows)
before = kibibytes()
for rows in range(132, 432):
    product(rows)
print(kibibytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux" or not torch.backends.mkldnn.is_available(), reason="no oneDNN or no /proc")
def test_products_of_ever_new_lengths_are_not_all_kept():
    unset = {k: v for k, v in os.environ.items() if not k.endswith("CACHE_CAPACITY")}

    def growth(kind):
        done = subprocess.run(
            [sys.executable, "-c", GROWTH, kind], env=unset, check=True, stdout=subprocess.PIPE, text=True
        )
        return int(done.stdout)

    assert growth("bounded") < growth("unbounded") / 2
