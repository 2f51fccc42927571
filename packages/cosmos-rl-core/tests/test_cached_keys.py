"""Models of transformers take keys and values by one name or the other."""

from functools import wraps

from torch import nn

from cosmos_rl_core.rollout.cached_keys import cache_argument


class Old(nn.Module):
    def forward(self, tokens, past_key_values=None, **kwargs): ...


def renames(forward):
    """As transformers does for callers with the old name."""

    @wraps(forward)
    def renamed(*args, **kwargs):
        return forward(*args, **kwargs)

    return renamed


class New(nn.Module):
    @renames
    def forward(self, tokens, cache=None, **kwargs): ...


def test_each_class_takes_them_by_its_own_name():
    assert [cache_argument(model) for model in (Old(), New(), Old())] == ["past_key_values", "cache", "past_key_values"]
