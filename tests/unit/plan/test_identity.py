from __future__ import annotations

from itertools import product

from vllm_ray_operator.plan.identity import instance_id


def test_reads_as_what_it_is() -> None:
    assert instance_id("chat", "1a2b3c4d-5e6f-0000", 7, "x9k2q1") == "chat-1a2b3c4d-a7-x9k2q1"


def test_every_part_tells_ids_apart() -> None:
    parts = product(("chat", "chat-a1"), ("11111111-x", "22222222-x"), (1, 11), ("n", "m"))
    ids = [instance_id(*part) for part in parts]
    assert len(set(ids)) == len(ids) == 16
