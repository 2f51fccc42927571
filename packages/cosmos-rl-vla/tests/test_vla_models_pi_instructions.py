"""Instructions to tokens."""

import subprocess
import sys

import numpy as np
import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.models.instructions import Instructions, state_bins, word_instructions

TEXTS = ["open the faucet", "close the faucet"]
NO_STATES = np.zeros((2, 0), np.float32)


def test_words_become_tokens_in_alphabetical_order():
    instructions = word_instructions(TEXTS)
    found = instructions(["Close_the faucet", "open"], NO_STATES)
    # <pad> <unk> <bos> close faucet open the
    assert found.tokens.tolist() == [[2, 3, 6, 4], [2, 5, 0, 0]]
    assert found.mask.tolist() == [[True] * 4, [True, True, False, False]]
    assert instructions.vocab_size == 7


def test_an_unknown_word_is_the_unknown_token():
    assert word_instructions(TEXTS)(["turn the faucet"], NO_STATES[:1]).tokens.tolist() == [[2, 1, 6, 4]]


def test_a_saved_tokenizer_gives_the_same_tokens(tmp_path):
    instructions = word_instructions(TEXTS)
    instructions.save(tmp_path)
    loaded = Instructions.load(tmp_path, format="words", max_length=16)
    assert loaded(TEXTS, NO_STATES).tokens.tolist() == instructions(TEXTS, NO_STATES).tokens.tolist()


def test_transformers_reads_the_saved_tokenizer(tmp_path):
    from transformers import PreTrainedTokenizerFast

    instructions = word_instructions(TEXTS)
    instructions.save(tmp_path)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert theirs("<bos>open the faucet")["input_ids"] == [2, 5, 6, 4]


def test_prompts_are_those_of_openpi():
    tokenizer = word_instructions(TEXTS)
    state = np.array([-1.0, 0.0, 1.0], np.float32)
    for format, expected in (
        ("pi0", "<bos>pick up the bowl\n"),
        ("pi05", "<bos>Task: pick up the bowl, State: 0 128 255;\nAction: "),
    ):
        instructions = Instructions(tokenizer._tokenizer, format=format, max_length=48)
        assert instructions.prompt("pick_up the\n bowl ", state) == expected


def test_a_state_is_cut_into_256_bins_of_the_unit_range():
    assert state_bins(np.array([-1.5, -1.0, -0.993, -0.99, 0.999, 1.5])).tolist() == [-1, 0, 0, 1, 255, 255]


def test_an_instruction_that_is_too_long_is_named():
    with pytest.raises(ValueError, match=r"5 tokens, the maximum is 4.*open the faucet now"):
        word_instructions(TEXTS, max_length=4)(["open the faucet now"], NO_STATES[:1])


def test_a_missing_tokenizer_says_which(tmp_path):
    with pytest.raises(UserError, match="PaliGemma"):
        Instructions.load(tmp_path, format="pi05", max_length=200)


def test_what_the_controller_may_load_brings_no_torch():
    names = ("actions", "config", "models.pi.config", "models.instructions")
    imports = "; ".join(f"import cosmos_rl_vla.{name}" for name in names)
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
