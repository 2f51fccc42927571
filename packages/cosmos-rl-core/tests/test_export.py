"""`cosmos-rl export`: a checkpoint, whole or in parts, as a directory that other programs load."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cosmos_rl_core import run
from cosmos_rl_core.checkpoint.export import export, write_sharded
from cosmos_rl_core.checkpoint.manifest import Origin, TrainState
from cosmos_rl_core.checkpoint.resume import recipe_of
from cosmos_rl_core.checkpoint.saver import CheckpointSaver
from cosmos_rl_core.cli.app import main
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.dtensor import whole
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.rank_group import RankGroup
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.recipe.model_card import model_card
from cosmos_rl_core.recipe.sections import CheckpointSection
from cosmos_rl_core.storage.folder import Folder
from cosmos_rl_core.testing.tiny_model import TinyPolicy
from cosmos_rl_core.testing.tiny_task import TinyModel
from cosmos_rl_core.train.trainer import Trainer
from doubles.ranks import run_ranks

RECIPE = {
    "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "max_steps": 2, "placement": "inline"},
    "model": {"actions": 3, "contexts": 5},
    "data": {"rows": 6},
    "rollout": {"engine": "tiny", "group_size": 4, "sampling": {"max_tokens": 3}},
    "reward": {"functions": [{"name": "hits"}]},
    "policy": {"prompts_per_step": 2},
    "sync": {"backend": "cosmos_rl_core.testing.file_sync:FileSync"},
    "checkpoint": {"every_steps": 1},
    "logging": {"sinks": ["jsonl"]},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run with the checkpoints of steps 1 and 2."""
    directory = tmp_path_factory.mktemp("export") / "run"
    run(load_config(RECIPE, [f'run.output_dir="{directory}"']))
    return directory


def test_the_newest_checkpoint_of_a_run_is_exported(finished, tmp_path, capsys):
    main_without_exit(["export", str(finished), str(tmp_path / "model")])
    weights = load_file(tmp_path / "model" / "model.safetensors")
    expected = load_file(finished / "checkpoints" / "step_2" / "policy" / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    assert "step_2 -> " in capsys.readouterr().out


def main_without_exit(arguments):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 0


def test_an_export_has_a_model_card(finished, tmp_path):
    main_without_exit(["export", str(finished), str(tmp_path / "model"), "--step", "1"])
    card = (tmp_path / "model/README.md").read_text()
    _, front, text = card.split("---\n")
    assert front == 'tags: ["cosmos-rl", "grpo"]\n'
    assert "| steps | 1 |\n| prompts a step | 2 |\n| rollouts a prompt | 4 |\n| rewards | 1 x hits |\n" in text
    assert str(tmp_path) not in card and str(finished) not in card


def test_a_model_card_names_hub_models_and_no_path_of_a_machine():
    recipe = {
        "run": {"domain": "llm", "name": "gsm8k"},
        "algorithm": {"name": "sft"},
        "model": {"path": "HuggingFaceTB/SmolLM2-135M-Instruct"},
        "data": {"path": "~/private/rows.jsonl"},
        "policy": {"prompts_per_step": 32, "optimizer": {"learning_rate": 1e-5}},
        "reward": {"functions": []},
    }
    card = model_card(recipe, step=100, library="transformers")
    assert card.startswith(
        '---\nlibrary_name: "transformers"\nbase_model: "HuggingFaceTB/SmolLM2-135M-Instruct"\n'
        'tags: ["cosmos-rl", "sft"]\n---\n\n# gsm8k\n'
    )
    assert "| data | `rows.jsonl` |" in card and "private" not in card and "rollouts a prompt" not in card


def test_a_step_can_be_chosen(finished, tmp_path):
    assert export(str(finished), tmp_path / "model", step=1).checkpoint.endswith("step_1")
    with pytest.raises(UserError, match="has no checkpoint of step 7; it has 1, 2"):
        export(str(finished), tmp_path / "other", step=7)


def test_weights_can_be_cast(finished, tmp_path):
    checkpoint = finished / "checkpoints" / "step_2"
    export(str(checkpoint), tmp_path / "model", dtype="bfloat16")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    expected = load_file(checkpoint / "policy" / "model.safetensors")
    assert all(torch.equal(weights[name], expected[name].bfloat16()) for name in expected)
    assert json.loads((tmp_path / "model" / "config.json").read_text()) == {"actions": 3, "dtype": "bfloat16"}


def test_large_models_are_cut_into_files_with_an_index(tmp_path):
    tensors = {f"layer.{i}": torch.full((4,), float(i)) for i in range(5)}
    write_sharded(tmp_path, tensors.items(), name="model", max_shard_bytes=32)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 80}
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])


def save_sharded(rank, world_size, *, root, recipe):
    mesh = ReplicaMesh.build(ParallelDims(dp_shard=world_size), device=torch.device("cpu"))
    policy = TinyPolicy(TinyModel(actions=3, contexts=5), temperature=1.0, setup=ModelSetup(mesh=mesh))
    optimizer = torch.optim.SGD(policy.module.parameters(), lr=1.0)
    trainer = Trainer(policy, objective=None, optimizer=optimizer, lr_factor=lambda step: 1.0, max_grad_norm=1.0)
    saver = CheckpointSaver(
        CheckpointSection(),
        root=Folder.at(root),
        trainer=trainer,
        state=TrainState(step=0),
        ranks=RankGroup.of_all(),
        origin=Origin(num_ranks=world_size, recipe=recipe),
    )
    saver.finish()
    return {name: whole(tensor).numpy() for name, tensor in policy.weights().items()}


def test_the_parts_of_many_ranks_become_one_model(tmp_path):
    [expected, *_] = run_ranks(save_sharded, 4, root=str(tmp_path), recipe=recipe_of(load_config(RECIPE)))
    written = export(str(tmp_path), tmp_path / "model", max_shard_bytes=100)
    found = {}
    for file in (tmp_path / "model").glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name].numpy(), expected[name]) for name in expected)
    assert written.num_bytes == sum(value.nbytes for value in expected.values())


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    run(load_config(RECIPE, [f'run.output_dir="{tmp_path}/run"', "checkpoint.keep=1"]))
    file = tmp_path / "run" / "checkpoints" / "step_2" / "policy" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(UserError, match=r"model.safetensors is damaged"):
        export(str(tmp_path / "run"), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_nothing_is_written_over(finished, tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(UserError, match="exists already; give a new or empty directory"):
        export(str(finished), tmp_path)


def test_a_place_without_checkpoints_is_told(tmp_path):
    with pytest.raises(UserError, match="no checkpoint there; give a run's directory"):
        export(str(tmp_path), tmp_path / "model")


FORMATTED = """
from cosmos_rl_core.testing.tiny import Tiny

class Formatted(Tiny):
    export_formats = ("upper",)

    def export_as(self, format, directory, tensors, *, model, data):
        (directory / "config.json").write_text(f"{format} {model.actions} {data.rows}")
        return ((name.upper(), tensor) for name, tensor in tensors)

FORMATTED = Formatted()
"""


def test_a_domain_may_write_another_programs_format(tmp_path, monkeypatch):
    (tmp_path / "formatted.py").write_text(FORMATTED)
    monkeypatch.syspath_prepend(tmp_path)
    run(load_config(RECIPE, [f'run.output_dir="{tmp_path / "run"}"', "run.domain=formatted:FORMATTED"]))
    export(str(tmp_path / "run"), tmp_path / "plain")
    export(str(tmp_path / "run"), tmp_path / "model", format="upper", max_shard_bytes=1)
    plain, found = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "model"))
    assert {name.upper() for name in plain} == found.keys()
    assert (tmp_path / "model" / "config.json").read_text() == "upper 3 6"
    with pytest.raises(UserError, match="--format lower: choose one of upper"):
        export(str(tmp_path / "run"), tmp_path / "other", format="lower")
    with pytest.raises(UserError, match="leave out --keep-adapters"):
        export(str(tmp_path / "run"), tmp_path / "other", format="upper", merge_adapters=False)


def test_a_domain_of_one_format_says_so(finished, tmp_path):
    with pytest.raises(UserError, match="--format lerobot: the models of domain tiny are written in one format"):
        export(str(finished), tmp_path / "model", format="lerobot")


def test_an_unknown_dtype_is_told(finished, tmp_path):
    with pytest.raises(UserError, match="--dtype int4: choose one of float32, bfloat16, float16"):
        export(str(finished), tmp_path / "model", dtype="int4")
