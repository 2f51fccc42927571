"""Generated layout pairs, each resharded by brute force."""

import pytest
from transfer_oracle import bytes_held, random_case, wrong_parts

from cosmos_rl_transfer.planning.plan import plan

BUCKET_BYTES = (64, 200, 1000, 1 << 20)


def check(seed):
    case = random_case(seed)
    for relay in ("off", "on"):
        made = plan(case.source, case.target, relay=relay, bucket_bytes=BUCKET_BYTES[seed % len(BUCKET_BYTES)])
        assert wrong_parts(made, case.source, case.target, seed) == [], case.text
        assert made.total_bytes == made.lower_bound == bytes_held(case.target), case.text
        assert all(b.num_bytes <= made.bucket_bytes for stream in made.streams.values() for b in stream), case.text
        assert relay == "on" or sum(made.bytes_out.values()) == made.total_bytes, case.text


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_plans_move_what_a_brute_force_reshard_moves(first):
    for seed in range(first, first + 20):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 250))
def test_two_thousand_plans_move_what_a_brute_force_reshard_moves(first):
    for seed in range(first, first + 250):
        check(seed)


def test_the_matrix_has_every_kind_of_layout():
    texts = " | ".join(random_case(seed).text for seed in range(200))
    wanted = ["pp2", "dp_replicate3", "dp_shard3", "cp2", "tp3", "ep4", "cuts", "ragged", "tp8", "padded to 64", "x 3"]
    assert [kind for kind in wanted if kind not in texts] == []
    assert all(f"tied at {side}" in texts for side in ("both", "source", "target"))
