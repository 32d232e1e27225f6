"""The workers' side of kv_cache: find and read prefixes, store blocks in the background. Every failure is a miss."""

from shoal_common.kv_cache_client.nodes import CacheNodes
from shoal_common.kv_cache_client.prefixes import Prefix, PrefixCache
from shoal_common.kv_cache_client.writer import CacheItem, CacheWriter

__all__ = ["CacheItem", "CacheNodes", "CacheWriter", "Prefix", "PrefixCache"]
