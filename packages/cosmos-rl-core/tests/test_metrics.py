"""The meaning of each metric."""

from cosmos_rl_core.observe.metrics import all_metrics, metric, notes


def test_a_metric_of_its_own_goes_before_its_family():
    assert metric("loss_policy").name == "loss_policy"
    assert metric("loss_mine").name == "loss_*"
    assert metric("reward/exact").name == "reward/*"
    assert metric("eval/reward_mean task=open").name == "eval/reward_mean *"
    assert metric("mine") is None


def test_notes_are_plain_text_for_those_that_have_an_entry():
    found = notes(["clip_fraction", "mine"])
    assert found == {"clip_fraction": "Share of trained terms whose ratio is clipped. Healthy: below 0.3."}
    assert not any("`" in note for note in notes([each.name for each in all_metrics()]).values())
