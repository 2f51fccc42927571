"""Lines of `cosmos-rl doctor` about the hub and its cache."""

from huggingface_hub import constants

from cosmos_rl_llm import hub


def test_a_hub_that_does_not_answer_is_a_note(monkeypatch, tmp_path):
    (tmp_path / "models--a--b").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "silence", lambda: "the hub does not answer (timed out)")
    asked, cache = hub.checks()
    assert (asked.level, asked.text) == ("note", "the hub does not answer (timed out)")
    assert "HF_ENDPOINT" in asked.fix
    assert (cache.level, "1 models" in cache.text) == ("ok", True)


def test_a_hub_that_answers_is_ok(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr(hub, "silence", lambda: "")
    asked, cache = hub.checks()
    assert (asked.level, asked.text) == ("ok", f"{constants.ENDPOINT} answers")
    assert "does not exist yet" in cache.text
