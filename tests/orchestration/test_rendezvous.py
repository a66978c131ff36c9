"""The variables of torch.distributed."""

from __future__ import annotations

from megarl.orchestration.rendezvous import Place, rendezvous


def test_ranks_of_one_machine_meet_on_loopback_at_rank_zeros_port():
    envs = rendezvous([Place("a", "10.0.0.1", 5001), Place("a", "10.0.0.1", 5002)], own_device=False)
    assert envs[1] == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "5001",
    }


def test_local_rank_counts_the_ranks_of_each_node_also_when_they_alternate():
    places = [Place(node, f"10.0.0.{i}", 5000 + i) for i, node in enumerate("abab")]
    envs = rendezvous(places, own_device=False)
    assert [env["LOCAL_RANK"] for env in envs] == ["0", "0", "1", "1"]
    assert {env["MASTER_ADDR"] for env in envs} == {"10.0.0.0"}


def test_a_rank_that_sees_only_its_own_device_uses_number_zero():
    places = [Place("a", "10.0.0.1", 5001), Place("a", "10.0.0.1", 5002)]
    assert [env["LOCAL_RANK"] for env in rendezvous(places, own_device=True)] == ["0", "0"]
