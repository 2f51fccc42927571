from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import Field, ValidationError

from cosmos_rl_core.algorithms.config import READS, AlgorithmConfig
from cosmos_rl_core.algorithms.table import TABLE, Algorithm, find_algorithm
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.base import Strict

every_algorithm = pytest.mark.parametrize("name", sorted(TABLE))


def errors_of(**keys):
    """The message for each key that is refused."""
    with pytest.raises(ValidationError) as caught:
        AlgorithmConfig(**keys)
    return {str(error["loc"][0]): error["msg"] for error in caught.value.errors()}


@every_algorithm
def test_defaults_come_from_the_row(name):
    config = AlgorithmConfig(name=name)
    assert {key: getattr(config, key) for key in TABLE[name].defaults} == TABLE[name].defaults


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", ("group_std", "clipped", 0.2, 0.2, "sequence_mean_of_means")),
        ("dr_grpo", ("group_mean", "clipped", 0.2, 0.2, "constant")),
        ("dapo", ("group_std", "clipped", 0.2, 0.28, "term_mean")),
        ("gspo", ("group_std", "sequence_clipped", 3e-4, 4e-4, "sequence_mean_of_means")),
        ("cispo", ("group_std", "cispo", 1.0, 4.0, "term_mean")),
        ("dppo", ("group_mean", "dppo", 0.2, 0.2, "term_mean")),
    ],
)
def test_rows_are_what_the_papers_say(name, expected):
    config = AlgorithmConfig(name=name)
    found = (config.advantage, config.loss, config.clip_low, config.clip_high, config.aggregation)
    assert found == expected


@every_algorithm
def test_a_resolved_config_reads_back_as_itself(name):
    config = AlgorithmConfig(name=name)
    assert AlgorithmConfig.model_validate(config.model_dump()) == config


def test_the_users_keys_override_the_row():
    config = AlgorithmConfig(name="dapo", clip_high=0.4)
    assert (config.clip_low, config.clip_high, config.aggregation) == (0.2, 0.4, "term_mean")


def test_a_misspelt_name_is_answered_with_the_names():
    message = errors_of(name="grpoo")["name"]
    assert "did you mean 'grpo'?" in message and "dapo, " in message


def test_a_misspelt_key_and_a_misspelt_name_are_told_together():
    assert set(errors_of(name="grpoo", clip_hi=0.3)) == {"name", "clip_hi"}


def test_a_key_that_is_not_known_is_an_error():
    assert set(errors_of(name="grpo", epsilon=0.2)) == {"epsilon"}


@pytest.mark.parametrize(
    ("keys", "key", "fix"),
    [
        ({"name": "gspo", "dual_clip": 3.0}, "dual_clip", 'set loss = "clipped"'),
        (
            {"name": "aipo", "clip_high": 0.3},
            "clip_high",
            'set loss = "clipped" or "sequence_clipped" or "sequence_clipped_token" or "cispo" or "dppo"',
        ),
        ({"name": "grpo", "max_ratio": 4.0}, "max_ratio", 'set loss = "truncated"'),
        ({"correction": "mask"}, "correction", 'set old_logprobs = "policy"'),
        ({"correction_cap": 3.0}, "correction_cap", 'set old_logprobs = "policy"'),
        ({"old_logprobs": "policy", "correction_floor": 0.5}, "correction_floor", 'set correction = "mask"'),
        (
            {"old_logprobs": "policy", "correction": "none", "correction_cap": 3.0},
            "correction_cap",
            "remove it",
        ),
        ({"kl_estimator": "k2"}, "kl_estimator", "set kl_coef"),
        ({"kl_unbiased": True}, "kl_unbiased", "set kl_coef"),
        ({"kl_coef": 0.1, "kl_unbiased": True, "kl_ratio": "old"}, "kl_ratio", 'old_logprobs = "policy"'),
        ({"kl_coef": 0.1, "kl_estimator": "exact_dt", "kl_unbiased": True}, "kl_unbiased", "set it to false"),
        ({"entropy_aggregation": "term_mean"}, "entropy_aggregation", "set entropy_coef"),
        ({"name": "rloo", "std_epsilon": 1e-4}, "std_epsilon", 'set advantage = "global_std" or "group_std"'),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "kl_estimator", "kl_unbiased = true"),
        ({"kl_coef": 0.1, "kl_estimator": "k2", "kl_unbiased": True}, "kl_unbiased", '"k1" or "k3"'),
        ({"aggregation_constant": 100}, "aggregation_constant", 'aggregation = "constant"'),
        ({"overlong_penalty": 0.5}, "overlong_penalty", "overlong_buffer_terms"),
        ({"name": "sft", "kl_coef": 0.1}, "kl_coef", "remove it"),
        ({"name": "sapo", "clip_high": 0.3}, "clip_high", "set loss ="),
        ({"sapo_temperature": 2.0}, "sapo_temperature", 'set loss = "sapo"'),
        ({"vespo_k": 1.0}, "vespo_k", 'set loss = "vespo"'),
        ({"name": "vespo", "old_logprobs": "policy"}, "old_logprobs", 'take "rollout"'),
        ({"name": "dppo", "old_logprobs": "policy"}, "old_logprobs", 'take "rollout"'),
        ({"correction_level": "sequence"}, "correction_level", 'set old_logprobs = "policy"'),
        (
            {"old_logprobs": "policy", "correction": "none", "correction_level": "geometric"},
            "correction_level",
            "remove it",
        ),
        ({"entropy_coef_step": 0.1}, "entropy_coef_step", "set entropy_target"),
        ({"entropy_coef_max": 0.1}, "entropy_coef_max", "set entropy_target"),
        ({"entropy_target": 0.2, "entropy_coef": 0.2, "entropy_coef_max": 0.1}, "entropy_coef", "lower it"),
        ({"advantage": "pooled_std", "max_variance_rollouts": 4}, "max_variance_rollouts", "remove it"),
        ({"name": "sft", "top_entropy": 0.2}, "top_entropy", "remove it"),
    ],
)
def test_a_key_without_effect_is_an_error_with_the_remedy(keys, key, fix):
    found = errors_of(**keys)
    assert set(found) == {key}
    assert fix in found[key]


def test_all_keys_without_effect_are_told_at_once():
    assert set(errors_of(name="gspo", dual_clip=3.0, max_ratio=4.0)) == {"dual_clip", "max_ratio"}


def test_a_key_at_its_default_is_harmless():
    assert AlgorithmConfig(name="gspo", max_ratio=2.0) == AlgorithmConfig(name="gspo")


@pytest.mark.parametrize(
    "keys",
    [
        {"dual_clip": 3.0},
        {"loss": "truncated", "max_ratio": 4.0},
        {"old_logprobs": "policy", "correction": "mask", "correction_floor": 0.5, "correction_cap": 5.0},
        {"kl_coef": 0.1, "kl_estimator": "k1", "kl_unbiased": True},
        {"aggregation": "constant", "aggregation_constant": 100},
        {"entropy_coef": 0.1, "entropy_aggregation": "constant", "aggregation_constant": 100},
        {"name": "sft", "aggregation": "sequence_mean_of_sums"},
        {"entropy_target": 0.2, "entropy_aggregation": "term_mean", "entropy_coef_step": 0.1},
        {"old_logprobs": "policy", "correction": "mask", "correction_level": "sequence"},
        {"name": "grpo", "rollout_kl_coef": 0.01, "top_entropy": 0.2, "mask_truncated": True},
    ],
)
def test_keys_with_an_effect_are_taken(keys):
    config = AlgorithmConfig(**keys)
    assert {key: getattr(config, key) for key in keys} == keys


@pytest.mark.parametrize("keys", [{"dual_clip": 1.0}, {"clip_low": 1.5}, {"max_ratio": 0.5}, {"kl_coef": -0.1}])
def test_values_out_of_range_are_errors(keys):
    assert set(errors_of(**keys)) == set(keys)


def test_each_ratio_key_is_read_by_some_loss():
    assert frozenset().union(*READS.values()) <= set(AlgorithmConfig.model_fields)


MY_ALGORITHMS = """
from cosmos_rl_core.algorithms.table import Algorithm

def my_loss(logprobs, old_logprobs, terms, config):
    return -terms.advantages * logprobs, {}

REINFORCE = Algorithm(
    name="reinforce", title="", paper="", summary="", defaults={"advantage": "group_mean"}, loss=my_loss
)
TEXT = "not an algorithm"
"""


@pytest.fixture
def my_algorithms(tmp_path, monkeypatch):
    (tmp_path / "my_algorithms.py").write_text(MY_ALGORITHMS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("my_algorithms")
def test_an_algorithm_of_your_own_brings_its_defaults():
    config = AlgorithmConfig(name="my_algorithms:REINFORCE", max_ratio=9.0)  # its loss may read any key
    assert (config.advantage, config.max_ratio) == ("group_mean", 9.0)


@pytest.mark.usefixtures("my_algorithms")
def test_a_named_loss_beside_a_loss_of_your_own_is_an_error():
    assert "its own loss" in errors_of(name="my_algorithms:REINFORCE", loss="cispo")["loss"]


@pytest.mark.usefixtures("my_algorithms")
def test_something_else_under_the_name_of_an_algorithm_is_an_error():
    with pytest.raises(UserError, match="is a str"):
        find_algorithm("my_algorithms:TEXT")


def test_the_controllers_side_does_not_import_torch():
    code = (
        "import sys; from cosmos_rl_core.algorithms import rules, config; "
        "config.AlgorithmConfig(name='dapo'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


class OwnOptions(Strict):
    sharpness: float = Field(default=1.0, gt=0)


WITH_OPTIONS = Algorithm(name="sharp", title="", paper="", summary="", defaults={"loss": "clipped"}, Options=OwnOptions)


def test_an_algorithms_own_options_are_filled_and_checked():
    name = f"{__name__}:WITH_OPTIONS"
    assert AlgorithmConfig.model_validate({"name": name}).options == {"sharpness": 1.0}
    assert AlgorithmConfig.model_validate({"name": name, "options": {"sharpness": 3}}).options == {"sharpness": 3.0}
    with pytest.raises(ValidationError) as caught:
        AlgorithmConfig.model_validate({"name": name, "options": {"sharpnes": 3}})
    (error,) = caught.value.errors()
    assert (error["type"], error["loc"]) == ("extra_forbidden", ("options", "sharpnes"))


def test_options_of_an_algorithm_without_any_are_an_error():
    with pytest.raises(ValidationError, match="grpo has none"):
        AlgorithmConfig.model_validate({"name": "grpo", "options": {"x": 1}})
