"""A kernel is chosen by its time, once per processor, and never costs more than the plain one."""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from cosmos_rl_core import kernel_choice
from cosmos_rl_core.parallel.axes.linear import use_onednn
from cosmos_rl_core.testing.slowdown import NO_SLOWER, slowdown


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COSMOS_RL_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_choice, "_choices", {})
    kernel_choice.log_choice.cache_clear()


def busy(count):
    return lambda: sum(range(count))


def test_the_faster_one_is_chosen_and_logged(capsys, monkeypatch):
    assert kernel_choice.fastest("sums", {"plain": busy(30_000), "short": busy(3_000)}) == "short"
    assert kernel_choice.fastest("products", {"plain": busy(3_000), "long": busy(30_000)}) == "plain"
    logged = ["sums: short", "products: plain"]
    assert [line.partition(" (")[0] for line in capsys.readouterr().err.splitlines()] == logged
    monkeypatch.setattr(kernel_choice, "_choices", {})  # as in another process, which measures nothing
    kernel_choice.log_choice.cache_clear()
    kernel_choice.fastest("sums", {"plain": busy(30_000), "short": busy(3_000)})
    assert capsys.readouterr().err.startswith("sums: short (plain ")


def test_a_tie_stays_with_the_plain_one():
    same = busy(30_000)
    assert kernel_choice.fastest("tie", {"plain": same, "same": same}) == "plain"


def test_another_process_reads_the_choice(tmp_path, monkeypatch):
    kernel_choice.fastest("sums", {"plain": busy(30_000), "short": busy(3_000)})
    code = "from cosmos_rl_core.kernel_choice import fastest; print(fastest('sums', {'plain': None, 'short': None}))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "short\n"
    # A processor with fewer instructions has choices of its own.
    changed = dict(os.environ, ATEN_CPU_CAPABILITY="default")
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=changed)
    assert "TypeError: 'NoneType' object is not callable" in failed.stderr


def test_a_kernel_that_changed_is_measured_again(tmp_path, monkeypatch):
    kernel = tmp_path / "kernel.py"
    chosen = []
    for source, short in [("one", 3_000), ("one", 300_000), ("two", 300_000)]:
        kernel.write_text(source)
        monkeypatch.setattr(kernel_choice, "_choices", {})  # as in another process
        kernel_choice._digest.cache_clear()
        candidates = {"plain": busy(30_000), "short": busy(short)}
        chosen.append(kernel_choice.fastest("sums", candidates, code=[str(kernel)]))
    assert chosen == ["short", "short", "plain"]


@pytest.mark.parametrize("content", ["", "[]", '{"choices": 3}', '{"choices": {"sums": {"kernel": "removed"}}}'])
def test_a_damaged_cache_is_measured_again(content, monkeypatch):
    kernel_choice.cache_file().write_text(content)
    assert kernel_choice.fastest("sums", {"plain": busy(30_000), "short": busy(3_000)}) == "short"
    assert json.loads(kernel_choice.cache_file().read_text())["choices"]["sums"]["kernel"] == "short"


def test_without_a_writable_folder_each_process_measures(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("COSMOS_RL_CACHE", str(tmp_path / "file" / "folder"))
    assert kernel_choice.fastest("sums", {"plain": busy(30_000), "short": busy(3_000)}) == "short"
    assert "measured in each process anew" in caplog.text


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("rows", [64, 256, 1024, 2048])
@pytest.mark.parametrize(("width", "out"), [(64, 64), (128, 64), (128, 512), (576, 576)])
def test_a_chosen_product_is_never_slower_than_torchs(one_thread, rows, width, out):
    plain = nn.Linear(width, out)
    chosen = copy.copy(plain)  # the same weights and gradients: where they lie makes a difference of up to 4 %
    use_onednn(chosen)
    input, slope = torch.randn(rows, width, requires_grad=True), torch.randn(rows, out)
    runs = [lambda layer=layer: layer(input).backward(slope) for layer in (plain, chosen)]
    assert slowdown(plain=runs[0], chosen=runs[1]) <= NO_SLOWER
