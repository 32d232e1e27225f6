"""Settings of a node."""

from __future__ import annotations

from pathlib import Path

import pytest
from shoal_common import settings
from shoal_common.errors import FailedPrecondition
from shoal_kv_cache.config import KvCacheConfig
from shoal_kv_cache.node_id import stable_node_id

TAG = "ab" * 32


def load(**values: str) -> KvCacheConfig:
    environ = {f"SHOAL_KV_CACHE_{name.upper()}": value for name, value in values.items()}
    return settings.load(KvCacheConfig, service="kv_cache", environ=environ, argv=()).service


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("copies", "3"),
        ("remote_url", "http://nobody"),
        ("remote_url", "http://user:secret@nobody"),
        ("ssd_fsync", "sometimes"),
        ("tenant_quotas", "xyz=1:2"),
        ("tenant_quotas", f"{TAG}=1"),
        ("node_id", "a b"),
        ("queue_bytes", "-1"),
        ("ram_bytes", "0"),
        ("load_timeout_s", "0"),
        ("ssd_segment_file_bytes", "100"),
    ],
)
def test_a_bad_setting_is_refused_by_its_full_name(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"SHOAL_KV_CACHE_{name.upper()}") as refused:
        load(**{name: value})
    assert "secret" not in str(refused.value)


def test_a_disk_smaller_than_two_segment_files_is_refused() -> None:
    with pytest.raises(ValueError, match="SHOAL_KV_CACHE_SSD_BYTES"):
        load(ssd_directory="/somewhere", ssd_bytes=str(256 << 20))


def test_quotas_hold_for_all_but_the_exceptions() -> None:
    quotas = load(tenant_ram_bytes="100", tenant_quotas=f"{TAG}=1:2").quotas()
    assert (quotas.ram(bytes.fromhex(TAG)), quotas.ssd(bytes.fromhex(TAG))) == (1, 2)
    assert (quotas.ram(b"other"), quotas.ssd(b"other")) == (100, None)


def test_a_node_keeps_its_name_on_its_disk(tmp_path: Path) -> None:
    made = stable_node_id(configured="", ssd_directory=tmp_path, instance_id="kv_cache-1")
    assert made == stable_node_id(configured="", ssd_directory=tmp_path, instance_id="kv_cache-2")
    assert stable_node_id(configured="named", ssd_directory=tmp_path, instance_id="kv_cache-2") == "named"
    assert stable_node_id(configured="", ssd_directory=None, instance_id="kv_cache-3") == "kv_cache-3"
    (tmp_path / "node_id").write_text("")
    with pytest.raises(FailedPrecondition, match="node_id"):
        stable_node_id(configured="", ssd_directory=tmp_path, instance_id="kv_cache-4")
