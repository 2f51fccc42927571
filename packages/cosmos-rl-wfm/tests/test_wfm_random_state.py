"""Policy and engine of an inline run are built in two threads, and have to begin with the same network."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from wfm_fixtures import pixel_model

from cosmos_rl_wfm.models.build import build_model


def test_networks_built_side_by_side_are_the_one_built_alone():
    pytest.importorskip("peft", reason="an extra of the package")
    config = pixel_model(lora={"rank": 2, "alpha": 2.0})
    alone = build_model(config).network.state_dict()
    with ThreadPoolExecutor(4) as pool:
        together = [model.network.state_dict() for model in pool.map(lambda _: build_model(config), range(12))]
    for weights in together:
        assert all(torch.equal(weights[name], tensor) for name, tensor in alone.items())


IN_THE_MIDDLE = """
import sys, threading, time
from cosmos_rl_wfm.models.build import build_model
from wfm_fixtures import pixel_model

def is_there(name):
    module = sys.modules.get(name)
    return module is not None and not module.__spec__._initializing

def second():
    while not is_there("diffusers.utils.logging"):
        time.sleep(0.001)
    assert not is_there("diffusers")
    built.append(build_model(pixel_model()))

assert "diffusers" not in sys.modules
built = []
thread = threading.Thread(target=second)
thread.start()
built.append(build_model(pixel_model()))
thread.join()
print(len(built))
"""


@pytest.mark.ci
def test_a_network_is_built_while_another_thread_imports_diffusers():
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", IN_THE_MIDDLE], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "2", done.stderr
