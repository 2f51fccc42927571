"""Tokens of training are those of generation, for each kind of tokenizer and of chat template."""

from functools import cache

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from cosmos_rl_core.errors import PromptError
from cosmos_rl_llm.data.chat import Chat

WORDS = """Two plus two is four, and two times two is four as well. hello there\n\nsure: ciao!  What is it? user system
assistant think the answer INST hi bye be brief <|user|> [INST] [/INST] <think> </think> it's 1 2 3 45 678 ok\n"""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"]
SPECIAL += ["<|eot_id|>", "<start_of_turn>", "<end_of_turn>"]
SPECIAL += ["<|glm_user|>", "<|glm_assistant|>", "<|r1_user|>", "<|r1_assistant|>"]

TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "zephyr": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "mistral": "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
    " {{ m.content }}</s>{% endif %}{% endfor %}",
    "mistral_tight": "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
    "{{ m.content | trim }}</s>{% endif %}{% endfor %}",
    "llama3": "<s>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "gemma": "<s>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "glm": "<s>{% for m in messages %}<|glm_{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|glm_assistant|>\n{% endif %}",
    "marked": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "marked_after_a_space": "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {% generation %}{{ m.content }}</s>{% endgeneration %}{% endif %}{% endfor %}",
}
THINKING = (  # the prompt opens a thought, and a chat has answers without theirs
    "<s>{% for m in messages %}<|r1_{{ m.role }}|>{{ m.content.split('</think>') | last | trim }}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|r1_assistant|><think>\n{% endif %}"
)
ENDS = ("</s>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|glm_user|>")
CHAT = [
    {"role": "user", "content": "What is two plus two?"},
    {"role": "assistant", "content": "four, it's 4"},
    {"role": "user", "content": "sure"},
    {"role": "assistant", "content": "hello there!\n\nThe answer  is 45."},
]


def byte_level(pattern: str) -> Tokenizer:
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator([WORDS] * 9, trainer)
    return core


def sentencepiece(scheme: str) -> Tokenizer:
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>")
    core.train_from_iterator([WORDS] * 9, trainer)
    return core


def llama2() -> Tokenizer:
    """Writes a space before each text, and after each special token; merges are not confined to words."""
    core = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    core.train_from_iterator([WORDS] * 9, trainers.BpeTrainer(vocab_size=180, special_tokens=SPECIAL))
    core.pre_tokenizer = None
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    return core


def wordpiece() -> Tokenizer:
    core = Tokenizer(models.WordPiece(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    core.train_from_iterator([WORDS] * 9, trainers.WordPieceTrainer(vocab_size=150, special_tokens=SPECIAL))
    return core


KINDS = {
    "gpt2": lambda: byte_level(GPT2),
    "llama3": lambda: byte_level(LLAMA3),
    "unigram": lambda: sentencepiece("first"),
    "unigram_always": lambda: sentencepiece("always"),
    "llama2": llama2,
    "wordpiece": wordpiece,
}


@cache
def trained(kind: str) -> str:
    return KINDS[kind]().to_str()


def make_chat(kind: str, template: str | None, *, frame: str = "<s> $A") -> Chat:
    core = Tokenizer.from_str(trained(kind))
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    core.post_processor = processors.TemplateProcessing(single=frame, special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=template
    )
    ends = frozenset(tokenizer.convert_tokens_to_ids(token) for token in ENDS)
    return Chat(tokenizer=tokenizer, end_ids=ends)


def whole(chat: Chat, messages) -> list[int]:
    """The tokens of a whole chat by transformers alone."""
    tokens = chat.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert isinstance(tokens, list)
    return [int(token) for token in tokens]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_training_are_those_of_generation(kind, name):
    chat = make_chat(kind, TEMPLATES[name])
    trained = chat.encode_answers({"messages": CHAT})
    tokens, learnt = trained.tokens.tolist(), trained.learnt
    reference = whole(chat, CHAT)
    assert tokens[: len(reference)] == reference
    assert tokens[len(reference) :] in ([], [chat.closing_id])  # GLM's last answer has no end in the text
    for place in (1, 3):
        prompt = chat.encode_prompt({"prompt": CHAT[:place]}).tokens.tolist()
        assert tokens[: len(prompt)] == prompt
        assert learnt[len(prompt)]
        assert not learnt[len(prompt) - 1]
        one = chat.encode_answers({"prompt": CHAT[:place], "response": CHAT[place]["content"]})
        assert one.tokens[: len(prompt)].tolist() == prompt
        assert one.learnt.tolist() == [False] * len(prompt) + one.learnt[len(prompt) :].tolist()
        answer = one.tokens[one.learnt].tolist()
        assert answer[-1] in chat.end_ids
        assert answer[:-1] == tokens[len(prompt) : len(prompt) + len(answer) - 1]
        assert tokens[len(prompt) + len(answer) - 1] in chat.end_ids
        assert learnt[len(prompt) + len(answer) - 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opening", ["\n", "\n\n", " ", "", "x"])
def test_a_token_never_spans_the_end_of_the_prompt(kind, opening):
    """Such as the line end of the prompt and that of an answer, which are one token of a text."""
    chat = make_chat(kind, TEMPLATES["chatml"])
    row = {"prompt": CHAT[:1], "response": f"{opening}hello there"}
    prompt = chat.encode_prompt(row).tokens.tolist()
    trained = chat.encode_answers(row)
    assert trained.tokens[: len(prompt)].tolist() == prompt
    assert not trained.learnt[: len(prompt)].any()
    assert trained.learnt[len(prompt)]
    text = chat.decode(trained.tokens[trained.learnt])
    expected = chat.decode(chat.tokenizer(row["response"], add_special_tokens=False)["input_ids"])
    assert text.split() == expected.split()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("response", ["<think>\ntwo\n</think>\nfour", "two\n</think>\nfour"])
def test_a_thought_that_the_prompt_opens_is_opened_once(kind, response):
    chat = make_chat(kind, THINKING)
    for row in ({"prompt": CHAT[:1], "response": response}, {"messages": [CHAT[0], {**CHAT[1], "content": response}]}):
        prompt = chat.encode_prompt({"prompt": CHAT[:1]})
        trained = chat.encode_answers(row)
        assert trained.text == prompt.text + "two\n</think>\nfour"
        assert trained.tokens[: len(prompt.tokens)].tolist() == prompt.tokens.tolist()
        assert trained.learnt.tolist() == [False] * len(prompt.tokens) + [True] * (
            len(trained.tokens) - len(prompt.tokens)
        )
        assert trained.tokens[-1] == chat.closing_id


def test_an_answer_without_the_thought_that_its_prompt_opens_is_refused():
    with pytest.raises(PromptError, match=r"a\.jsonl:1: the chat template opens a thought, <think>, and the answer"):
        make_chat("gpt2", THINKING).encode_answers({"prompt": CHAT[:1], "response": "four"}, where="a.jsonl:1")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frame", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
def test_plain_text_has_one_beginning_and_its_end_after_the_answer(kind, frame):
    chat = make_chat(kind, None, frame=frame)
    bare = chat.tokenizer("two plus two is", add_special_tokens=False)["input_ids"]
    both = chat.tokenizer("two plus two is four", add_special_tokens=False)["input_ids"]
    begin = [1] if "<s>" in frame else []
    row = {"prompt": "two plus two is", "response": " four"}
    assert chat.encode_prompt(row).tokens.tolist() == [*begin, *bare]
    trained = chat.encode_answers(row)
    assert trained.tokens.tolist() == [*begin, *both, 2]
    assert trained.learnt.sum() == len(both) - len(bare) + 1
    written = chat.encode_prompt({"prompt": "<s>two plus two is"}).tokens.tolist()
    assert written.count(1) == 1


def test_the_tools_of_a_row_are_in_its_prompt():
    template = "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t.name }}{% endfor %}<|im_end|>\n{% endif %}"
    chat = make_chat("gpt2", template + TEMPLATES["chatml"])
    row = {"prompt": CHAT[:1], "response": "ok", "tools": [{"name": "add"}, {"name": "multiply"}]}
    assert chat.encode_prompt(row).text.startswith("<|im_start|>tools\naddmultiply<|im_end|>\n<|im_start|>user")
    assert chat.encode_answers(row).text.startswith(chat.encode_prompt(row).text)
    assert "tools" not in chat.encode_prompt({**row, "tools": None}).text
    with pytest.raises(PromptError, match=r"a\.jsonl:1: the row has tools \(data\.tools_column\), .* shows none"):
        make_chat("gpt2", TEMPLATES["chatml"]).encode_prompt(row, where="a.jsonl:1")
