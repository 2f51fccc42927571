"""`python -m cosmos_rl_transfer`, as people type it."""

import json
import subprocess
import sys

import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.weight_sync import SyncSection
from cosmos_rl_transfer.__main__ import main
from cosmos_rl_transfer.backend import TransferSync
from cosmos_rl_transfer.layout.shapes import read_shapes
from cosmos_rl_transfer.layout.spread import parse_side
from cosmos_rl_transfer.planning.forecast import forecast, manifest_of

LLAMA_BYTES = 2 * 8_030_261_248


@pytest.fixture
def cli(capsys):
    """Run a command in this process; return (exit code, standard output, standard error)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run


def planned(source, target, shapes, **options):
    return forecast(
        read_shapes(shapes), parse_side(source), parse_side(target), bucket_bytes=32 << 20, **options
    ).as_json()


def test_a_plan_is_a_table(cli):
    code, out, _ = cli("plan", "--from", "fsdp8", "--to", "tp4 x 2", "--shapes", "llama-8b")
    assert code == 0
    assert "8,030,261,248 parameters in 291 tensors" in out
    assert "32.12 GB, 1.000 x the lower bound" in out


def test_a_plan_is_json(cli):
    code, out, _ = cli("plan", "--from", "hsdp4x8", "--to", "tp4 x 4", "--shapes", "llama-8b", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["source_ranks"] == 32
    assert found["received_bytes"] == found["lower_bound_bytes"] > 4 * LLAMA_BYTES  # norms are on every rank
    assert found["ratio"] < 1.01


def test_the_wire_dtype_halves_what_travels():
    whole = planned("fsdp2", "tp2", "smollm2-135m")
    half = planned("fsdp2", "tp2", "smollm2-135m", wire_dtype="float8_e4m3fn")
    assert half["received_bytes"] * 2 == whole["received_bytes"]


def test_relay_sends_each_byte_out_of_the_trainers_once():
    off = planned("fsdp2", "tp2 x 4", "smollm2-135m", relay="off")
    auto = planned("fsdp2", "tp2 x 4", "smollm2-135m")
    assert auto["relay"]
    assert auto["trainer_bytes"] * 4 == off["trainer_bytes"]
    assert auto["received_bytes"] == off["received_bytes"]


def test_the_time_is_that_of_the_busiest_network_card():
    found = planned("fsdp4", "tp2", "smollm2-135m", gbit=8)
    assert found["transfer_s"] == found["busiest_rollout_bytes"] / 1e9


def test_more_replicas_hold_more_copies():
    shapes = read_shapes("smollm2-135m")
    one, three = (manifest_of(shapes, parse_side(text)) for text in ("tp3", "tp3 x 3"))
    assert (len(one.ranks), len(three.ranks)) == (3, 9)
    assert len(three.replicas) == 3


def test_key_value_heads_stay_whole():
    """8 heads of 128 over 16 ranks: two ranks hold the same head."""
    manifest = manifest_of(read_shapes("llama-8b"), parse_side("tp16"))
    name = "model.layers.0.self_attn.k_proj.weight"
    (boxes,) = (layout.boxes for layout in manifest.layouts if layout.spec.name == name)
    assert boxes[0] == boxes[1] != boxes[2]
    assert boxes[0].shape == (128, 4096)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "fdsp8", "--to", "tp4", "--shapes", "llama-8b"], "did you mean fsdp?"),
        (["--from", "fsdp8", "--to", "tp4", "--shapes", "lama-8b"], "did you mean llama-8b?"),
        (["--from", "fsdp8", "--to", "tp4", "--shapes", "llama-8b", "--wire", "int3"], "dtype int3"),
        (["--from", "pp99", "--to", "tp4", "--shapes", "llama-8b"], "99 stages"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(cli, arguments, message):
    code, out, err = cli("plan", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and message in err
    assert len(err.splitlines()) == 1


def test_help_loads_no_torch():
    code = """
import sys
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.weight_sync import SyncSection
from cosmos_rl_transfer.backend import TransferSync
from cosmos_rl_transfer.__main__ import main
try:
    main(["plan", "--help"])
except SystemExit as ended:
    assert not ended.code
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_a_plan_loads_no_torch():
    code = """
import sys
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.weight_sync import SyncSection
from cosmos_rl_transfer.backend import TransferSync
from cosmos_rl_transfer.__main__ import main
try:
    main(["plan", "--from", "fsdp2", "--to", "tp2", "--shapes", "smollm2-135m"])
except SystemExit as ended:
    assert not ended.code
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_the_module_runs_as_a_program():
    command = [sys.executable, "-m", "cosmos_rl_transfer", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("plan", "doctor"))


def cost(**policy):
    """What `cosmos-rl plan` shows of a sync to two engines."""
    specs = read_shapes("smollm2-135m").specs
    return TransferSync().plan(specs, settings=SyncSection(relay="off"), policy=policy, replicas=2)


def test_the_cost_of_a_recipe_counts_the_ranks_of_the_policy():
    alone, spread = cost(), cost(dp_replicate=2, dp_shard=2)
    assert alone.received_bytes == alone.lower_bound_bytes == spread.received_bytes == 2 * 2 * 134_515_008
    assert alone.busiest_bytes == alone.received_bytes
    assert alone.busiest_bytes / 4 <= spread.busiest_bytes < 1.01 * alone.busiest_bytes / 4


def test_a_recipe_that_cannot_be_spread_is_the_users_error():
    with pytest.raises(UserError, match=r"\[policy.parallel\]: 30 layers cannot be cut into 31 stages"):
        cost(pp=31)
