from __future__ import annotations

import json

import pytest
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal_cli import kv_tables
from shoal_cli.main import main

NOBODY = ["--node", "127.0.0.1:1"]
STATS = pb.GetStatsResponse(
    node_id="a",
    acquire_count=4,
    hit_count=3,
    queried_tokens=1000,
    hit_tokens=900,
    tiers=[
        pb.TierStats(tier=pb.TIER_RAM, block_count=1200, used_bytes=3 << 20, capacity_bytes=1 << 30),
        pb.TierStats(tier=pb.TIER_SSD, failure_count=2, failing_reason="DISK_FULL"),
    ],
)


@pytest.mark.parametrize(
    "arguments",
    [
        ["flush"],
        ["flush", "--everything", "--kv-id", "k"],
        ["flush", "--tenant-tag", "abc"],
        ["flush", "--tenant-tag", "ab"],
        ["ls", "--tenant-tag", "xyz"],
        ["stats", "--node", "nowhere"],
        ["stats", "--node", "127.0.0.1:99999"],
        ["stats", "--node", "http://127.0.0.1:80"],
        ["stats", "--node", ":80"],
    ],
)
def test_a_filter_that_does_not_say_what_is_meant_is_one_line_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kv", *arguments, *NOBODY]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1


def test_a_tenant_is_named_by_the_secret_of_the_gateways(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SHOAL_CACHE_SECRET", raising=False)
    assert main(["kv", "ls", "--tenant", "acme", *NOBODY]) == 2
    assert "SHOAL_CACHE_SECRET" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["stats"], ["ls"], ["verify"], ["flush", "--everything"]])
def test_a_node_that_does_not_answer_is_named_and_status_1(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kv", *command, "--json", *NOBODY]) == 1
    shown = capsys.readouterr()
    assert "127.0.0.1:1" in shown.err
    json.loads(shown.out)
    # People see no table of nothing.
    assert main(["kv", *command, *NOBODY, "--timeout", "5"]) == 1
    assert "blocks  " not in capsys.readouterr().out


def test_a_flush_says_which_nodes_it_did_not_reach(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv", "flush", "--everything", "--json", *NOBODY, *NOBODY]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["nodes"] == 0
    assert [one["address"] for one in shown["unreached"]] == ["127.0.0.1:1"]
    assert main(["kv", "flush", "--everything", *NOBODY]) == 1
    assert "nothing is flushed" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "nan", "soon"])
def test_a_timeout_that_is_none_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["kv", "stats", *NOBODY, "--timeout", seconds])
    assert caught.value.code == 2
    assert "--timeout" in capsys.readouterr().err


def test_without_nats_a_node_can_still_be_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_NATS_URL", "off")
    assert main(["kv", "stats", "--mesh", "nobody"]) == 2
    assert "--node HOST:PORT" in capsys.readouterr().err


def test_the_table_has_a_row_per_tier_and_a_line_of_hits() -> None:
    lines = kv_tables.stats_table([("127.0.0.1:1", STATS)]).splitlines()
    assert lines[1].split() == ["a", "memory", "1,200", "0", "3", "MiB", "1", "GiB", "0", "B", "0", "B", "0", "0", "ok"]
    assert lines[2].split()[-1] == "DISK_FULL"
    assert lines[-1].startswith("a: 4 acquires, 3 with a hit, 90.0% of the tokens")


def test_json_has_whole_ids() -> None:
    group = pb.Group(
        kv_id="k" * 32, numerics_id="n" * 32, tenant_tag=b"\x01" * 32, tiers=[pb.TierStats(tier=pb.TIER_RAM)]
    )
    listed = pb.ListGroupsResponse(groups=[group])
    (shown,) = kv_tables.groups_as_json("there", listed)
    assert (shown["kv_id"], shown["tenant_tag"]) == ("k" * 32, "01" * 32)
    assert "k" * 12 + "  " in kv_tables.groups_table([("there", listed)])


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5 TiB")])
def test_sizes_are_in_powers_of_1024(count: int, text: str) -> None:
    assert kv_tables.size(count) == text
