import pytest
import torch

from cosmos_rl_core import assemble, processes
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.gpus import Nvml
from cosmos_rl_core.launch.check import check
from cosmos_rl_core.launch.gpus import AssignedGpus, GpuSupply, assign_gpus, gpus_per_rollout
from cosmos_rl_core.launch.placement import threads
from cosmos_rl_core.plan.run_plan import plan
from cosmos_rl_core.recipe.load import load_config, load_domain
from cosmos_rl_core.settings.base import ConfigError
from cosmos_rl_core.testing.tiny import Tiny
from doubles.fake_nvml import FakeNvml


class Spread(Tiny):
    """A domain whose engine needs as many GPUs as its options say."""

    def build_engine(self, model, *, data, name, options):
        return options

    def spread_engine(self, name, options, *, tp, pp):
        if options.get("size", tp) != tp:
            raise UserError(f"the options have size {options['size']}")
        return {**options, "size": tp * (pp or 1)}

    def gpus_per_engine(self, name, options):
        return options.get("size", 1)

    def share_gpu(self, name, options, *, processes):
        return {**options, "memory": 0.9 / processes}


SPREAD = Spread()


def recipe(*, replicas=1, size=1, parallel=None, **run):
    options = {} if size is None else {"size": size}
    return load_config({
        "run": {"domain": f"{__name__}:SPREAD", "max_steps": 1, **run},
        "model": {},
        "data": {},
        "rollout": {"engine": "tiny", "replicas": replicas, "options": options, "parallel": parallel or {}},
        "reward": {"functions": [{"name": "hits"}]},
        "sync": {"backend": "cosmos_rl_core.testing.file_sync:FileSync"},
    })  # fmt: skip


@pytest.fixture
def machine(monkeypatch):
    """Give this machine GPUs, named 0, 1, ..."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def have(number):
        nvml = Nvml(FakeNvml({str(index): () for index in range(number)}))
        monkeypatch.setattr(Nvml, "open", lambda: nvml)

    return have


def test_the_policys_ranks_come_first_then_the_rollouts():
    found = assign_gpus(recipe(replicas=2), 2, gpus="01234")
    assert (found.policies, found.rollouts, list(found.unused)) == ([["0", "1"]], [["2"], ["3"]], ["4"])
    assert str(found) == "policy-0 on 0,1, rollout-0 on 2, rollout-1 on 3; unused: 4"
    assert found.processes_per_gpu == 1


def test_a_rollout_replica_has_the_gpus_that_its_engine_needs():
    config = recipe(replicas=2, size=2)
    assert gpus_per_rollout(config) == 2
    assert assign_gpus(config, 4, gpus="01234567").rollouts == [["4", "5"], ["6", "7"]]


def test_the_gpus_of_a_replica_by_the_recipe_alone():
    config = recipe(replicas=2, size=None, parallel={"tp": 2, "pp": 2})
    assert gpus_per_rollout(config) == 4
    assert assemble.build_engine(config, SPREAD) == {"size": 4}
    assert [role.gpus for role in plan(config).roles] == [0, 1, 4]
    assert assign_gpus(config, 1, gpus="012345678").rollouts == [["1", "2", "3", "4"], ["5", "6", "7", "8"]]


def test_another_size_in_the_options_is_an_error_of_the_recipe():
    with pytest.raises(ConfigError, match=r"rollout.parallel.tp = 4: the options have size 2"):
        check(recipe(size=2, parallel={"tp": 4}))


def test_an_engine_of_one_gpu_refuses_more_by_name():
    tables = {"run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "max_steps": 1}, "model": {}, "data": {}}
    rest = {
        "reward": {"functions": [{"name": "hits"}]},
        "sync": {"backend": "cosmos_rl_core.testing.file_sync:FileSync"},
    }
    config = load_config({**tables, **rest, "rollout": {"engine": "tiny", "parallel": {"tp": 2, "pp": 3}}})
    with pytest.raises(ConfigError, match=r"tp = 2 and pp = 3: the engine 'tiny' of the tiny domain runs on one GPU"):
        check(config)
    one = load_config({**tables, **rest, "rollout": {"engine": "tiny", "parallel": {"tp": 1}}})
    assert gpus_per_rollout(one) == 1


def test_the_cores_are_divided_by_the_engines_processes():
    one, two = (threads(recipe(size=size))[1] for size in (1, 2))
    assert two == max(1, one // 2)


def test_fewer_gpus_than_processes_are_an_error_with_the_numbers():
    with pytest.raises(UserError) as raised:
        assign_gpus(recipe(replicas=2, size=2), 2, gpus=["0", "1", "5"])
    assert "needs 6 GPUs of this machine, 2 for the policy's ranks and 2 x 2 for rollout" in str(raised.value)
    assert "but 3 are visible (0,1,5)" in str(raised.value)
    assert "set [run] colocate = true to use the same GPUs in turns, or share_gpus = true" in str(raised.value)


def test_gpus_are_shared_where_the_recipe_allows_it():
    found = assign_gpus(recipe(replicas=2, share_gpus=True), 2, gpus=["0", "1"])
    assert (found.policies, found.rollouts, found.processes_per_gpu) == ([["0", "1"]], [["0"], ["1"]], 2)
    assert assign_gpus(recipe(replicas=2, share_gpus=True), 1, gpus=["0"]).processes_per_gpu == 3


def test_an_engine_on_a_shared_gpu_gets_its_part_of_the_memory():
    config = recipe()
    assert assemble.build_engine(config, SPREAD) == {"size": 1}
    assert assemble.build_engine(config, SPREAD, processes_per_gpu=3) == {"size": 1, "memory": pytest.approx(0.3)}


def test_two_ranks_never_share_a_gpu():
    with pytest.raises(UserError, match=r"the policy needs 2 GPUs .* one per rank, but 1 is visible \(3\)"):
        assign_gpus(recipe(share_gpus=True), 2, gpus=["3"])


def test_an_engine_never_has_one_gpu_twice():
    with pytest.raises(
        UserError, match=r"a rollout replica needs 4 GPUs, all of one machine, but 3 are visible .*rollout.parallel"
    ):
        assign_gpus(recipe(size=4, share_gpus=True), 1, gpus="012")


def test_a_machine_without_gpus_gives_none():
    found = assign_gpus(recipe(replicas=2), 2, gpus=[])
    assert found == AssignedGpus(policies=[()], rollouts=[(), ()])
    assert found.processes_per_gpu == 1


def test_the_plan_lists_gpus_or_names_the_shortage(machine):
    machine(0)
    config = recipe(replicas=2, size=2)
    assert plan(config).gpus == ""
    assert [role.gpus for role in plan(config).roles] == [0, 1, 2]
    machine(5)
    assert "GPUs: policy-0 on 0, rollout-0 on 1,2, rollout-1 on 3,4" in str(plan(config))
    assert "the run needs 9 GPUs" in plan(recipe(replicas=4, size=2)).gpus
    assert plan(recipe(replicas=4, placement="inline")).gpus == ""


def test_check_notes_that_this_machine_has_too_few(machine, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    machine(1)
    assert any("the run needs 2 GPUs" in text for text in check(recipe()).warnings)
    assert check(recipe(share_gpus=True)).warnings == ()


def test_workers_see_their_gpus_alone(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert processes.environment(gpus=["2", "3"])["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_a_domain_without_the_hook_has_one_gpu_per_engine():
    tables = {"run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "max_steps": 1}, "model": {}, "data": {}}
    config = load_config({**tables, "rollout": {"engine": "tiny"}, "reward": {"functions": [{"name": "hits"}]}})
    assert load_domain(config.run.domain).name == "tiny"
    assert gpus_per_rollout(config) == 1


def supply(number, *, rollout=1, share=False):
    visible = [str(index) for index in range(number)]
    return GpuSupply(visible=visible, per_worker={"policy": 2, "rollout": rollout}, share=share)


def test_workers_that_are_added_get_the_free_gpus():
    in_use = {"policy-0": ["0", "1"], "rollout-0": ["3"]}
    assert supply(8, rollout=2).assign({"policy": 1, "rollout": 1}, in_use=in_use) == {
        "policy": [["2", "4"]],
        "rollout": [["5", "6"]],
    }
    assert supply(0).assign({"rollout": 2}, in_use={}) == {"rollout": [(), ()]}


def test_more_workers_than_free_gpus_are_refused_with_the_numbers():
    with pytest.raises(UserError) as error:
        supply(4).assign({"rollout": 2}, in_use={"policy-0": ["0", "1"], "rollout-0": ["2"]})
    assert "2 GPUs of this machine are needed (2 more rollout x 1), but 1 of 4 are free" in str(error.value)
    assert "policy-0 on 0,1, rollout-0 on 2" in str(error.value)


def test_added_workers_share_the_gpus_with_the_fewest_processes():
    in_use = {"policy-0": ["0", "1"], "rollout-0": ["2"]}
    assert supply(3, share=True).assign({"rollout": 4}, in_use=in_use) == {"rollout": [["0"], ["1"], ["2"], ["0"]]}
