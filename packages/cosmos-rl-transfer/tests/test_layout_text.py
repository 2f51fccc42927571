import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.spread import Side, parse_side


@pytest.mark.parametrize(
    ("text", "side"),
    [
        ("fsdp8", Side(dp_shard=8)),
        ("dp_shard8", Side(dp_shard=8)),
        ("ddp4", Side(dp_replicate=4)),
        ("hsdp4x8", Side(dp_replicate=4, dp_shard=8)),
        ("tp4 x 2", Side(tp=4, replicas=2)),
        ("tp4 x2", Side(tp=4, replicas=2)),
        ("TP8 EP8 x 3", Side(tp=8, ep=8, replicas=3)),
        (" tp2  pp2 fsdp4 ", Side(pp=2, dp_shard=4, tp=2)),
    ],
)
def test_what_people_write_is_read(text, side):
    assert parse_side(text) == side


sizes = st.integers(1, 9)


@given(st.builds(Side, pp=sizes, dp_replicate=sizes, dp_shard=sizes, cp=sizes, tp=sizes, replicas=sizes))
def test_a_side_reads_back_from_its_own_text(side):
    assert parse_side(str(side)) == side


def test_replicas_and_experts_are_not_ranks_of_one_replica():
    assert parse_side("pp2 fsdp4 tp2 ep4 x 3").ranks == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fdsp8", r"'fdsp8' is no axis \(did you mean fsdp\?\); known: fsdpN"),
        ("", "names no axis; known: fsdpN"),
        ("x 2", "'x' is no axis"),
        ("8", "'8' is no axis; known"),
        ("tp", "write 'tp' as tpN"),
        ("hsdp8", "write 'hsdp8' as hsdpNxM"),
        ("tp4x2", "replicas as 'x N' after a space"),
        ("tp2 tp4", "tp is given twice"),
        ("fsdp2 hsdp2x2", "dp_shard is given twice"),
        ("tp0", "tp = 0: must be at least 1"),
        ("tp2 x 0", "replicas = 0: must be at least 1"),
        ("fsdp6 ep4", "ep = 4 does not divide dp_shard x cp x tp = 6 x 1 x 1 = 6"),
    ],
)
def test_bad_text_is_one_clear_error(text, message):
    with pytest.raises(LayoutError, match=message):
        parse_side(text)
