"""What each package exports, and that cookbook and docs use nothing else."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PUBLIC = {
    "cosmos_rl_core": (
        "Algorithm AlgorithmConfig Check Domain DomainBase ENGINE_CHECKS ENVIRONMENT_CHECKS EngineRequest Environment "
        "Episode Evaluated Exchange Generated Instances LossTerm Microbatch ModelSetup Objective Observation Options "
        "Policy PolicyBase PolicyOutputs Prompt PromptError Recorder Request RewardFn Rollout RolloutEngine "
        "RolloutGroup RunConfig RunResult SampleError Sampling SamplingSection Share TermBatch ThreadedEngine ToolCall "
        "TrainBatch Turn UserError WeightSpec WeightSync WorkerFailed accumulate check_environment check_reward "
        "engine_options evaluate generate load_config run"
    ),
    "cosmos_rl_transfer": (
        "AuthenticationError Box LayoutError Manifest PeerLost Publisher ReplicaMember ReplicaSubscriber "
        "Replicate Shard Subscriber TensorLayout Topology TransferError TransferPlan WeightMismatch plan "
        "published_specs whole_box"
    ),
    "cosmos_rl_llm": (
        "Chat LLM LLMDomain Sandbox SandboxOptions ToolEnvironment ToolUnavailable run_python write_sums "
        "write_tiny_model"
    ),
    "cosmos_rl_vla": (
        "BatchSimulator DemoWriter Demonstration Manner SimObservation SimSpec Simulator SimulatorError "
        "SimulatorLimits SimulatorPool Stepped VLA VLADomain Worded record"
    ),
    "cosmos_rl_wfm": (
        "DIRECTIONS Pretrained WFM WFMDomain brightness direction group_videos luma read_clip row_text "
        "sample_frames speed train_aesthetic"
    ),
}
"""Names that others write against: one is removed with a line in CHANGELOG.md."""
PAGES = [
    page
    for page in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("cookbook/**/*.md"),
        *ROOT.glob("packages/*/*.md"),
    ]
    if "decisions" not in page.parts
]
SCRIPTS = sorted(ROOT.glob("cookbook/**/*.py"))


@pytest.mark.parametrize("package", PUBLIC)
def test_a_package_exports_its_public_names(package):
    module = import_module(package)
    assert sorted(module.__all__) == sorted(PUBLIC[package].split())
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert inspect.getdoc(getattr(module, name)) or name.isupper()
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018


@pytest.mark.parametrize("package", PUBLIC)
def test_type_checkers_see_the_same_names(package):
    tree = ast.parse(Path(import_module(package).__file__ or "").read_text(encoding="utf-8"))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: f"{node.module}" for node in imports for alias in node.names}
    assert seen.keys() == set(PUBLIC[package].split())
    for name, home in seen.items():
        assert getattr(import_module(home), name) is getattr(import_module(package), name)


def deep_imports(source):
    """Imports of our modules that go past a package's public names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in PUBLIC:
            names = PUBLIC.get(node.module, "").split()
            yield from (f"{node.module}: {alias.name}" for alias in node.names if alias.name not in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("cosmos_rl_") and "." in alias.name)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_cookbook_imports_public_names_alone(script):
    assert list(deep_imports(script.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_in_pages_import_public_names_alone(page):
    for example in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        assert list(deep_imports(example)) == []


def test_recipes_of_the_cookbook_name_no_module_of_ours():
    recipes = "".join(file.read_text(encoding="utf-8") for file in ROOT.glob("cookbook/**/*.toml"))
    assert recipes and "cosmos_rl_" not in recipes


def test_a_deep_import_is_seen():
    assert list(deep_imports("from cosmos_rl_core.types import Prompt")) == ["cosmos_rl_core.types: Prompt"]
    assert list(deep_imports("from cosmos_rl_core import Prompt, prompt")) == ["cosmos_rl_core: prompt"]
    assert list(deep_imports("import cosmos_rl_llm.tiny")) == ["cosmos_rl_llm.tiny"]


def test_no_two_public_classes_have_one_name():
    files: dict[str, list[str]] = {}
    for path in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}
