"""The name of the argument for the key-value cache, in old and new releases of transformers."""

from functools import wraps

from torch import nn

from cosmos_rl_core.rollout.kv_cache import cache_argument


class Old(nn.Module):
    def forward(self, tokens, past_key_values=None, **kwargs): ...


def renames(forward):
    """Wraps `forward` with `functools.wraps`, as transformers' decorators do."""

    @wraps(forward)
    def renamed(*args, **kwargs):
        return forward(*args, **kwargs)

    return renamed


class New(nn.Module):
    @renames
    def forward(self, tokens, cache=None, **kwargs): ...


def test_each_class_has_its_own_name_for_the_cache():
    assert [cache_argument(model) for model in (Old(), New(), Old())] == ["past_key_values", "cache", "past_key_values"]
