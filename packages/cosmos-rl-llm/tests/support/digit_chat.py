"""A chat of one token a digit, and rows of supervised training packed with it."""

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from cosmos_rl_core.types import Prompt, Share
from cosmos_rl_llm.config import Overlong
from cosmos_rl_llm.data.chat import Chat
from cosmos_rl_llm.data.collate import collate_sft

WORDS = ["</s>", "<user>", "<assistant>", "<unk>", *"0123456789 "]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_chat(template: str | None = None, *, max_length: int | None = None, overlong: Overlong = "error") -> Chat:
    """One token a digit."""
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("</s>|<user>|<assistant>|."), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")
    tokenizer.chat_template = template
    return Chat(tokenizer=tokenizer, end_ids=frozenset({0}), max_length=max_length, overlong=overlong)


def words(tokens, mask=None) -> list[str]:
    kept = tokens if mask is None else tokens[mask]
    return [WORDS[token] for token in kept]


def collate(rows, chat, **keys):
    prompts = [Prompt(sample_id=place, row=row) for place, row in enumerate(rows)]
    return collate_sft(prompts, chat=chat, **{"microbatch_terms": 100, "share": Share(), **keys})
