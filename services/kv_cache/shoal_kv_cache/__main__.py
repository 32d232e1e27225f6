"""Runs one KV cache node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time

from shoal.common.v1 import kv_transport_service_pb2_grpc as transport_pb_grpc
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as pb_grpc
from shoal_common.announcer import Announcer
from shoal_common.bus import Bus
from shoal_common.errors import FailedPrecondition
from shoal_common.kv_transport import ExportTable, KvTransportServicer, SharedArena, host_id
from shoal_common.load import LoadReport
from shoal_common.presence import Presence
from shoal_common.process import Process, begin, run
from shoal_common.rpc.readiness import Readiness
from shoal_common.rpc.server import Service
from shoal_common.rpc.serving import serve
from shoal_common.settings import load_or_exit
from shoal_common.watcher import Watcher
from shoal_kv_cache.config import KvCacheConfig
from shoal_kv_cache.core.index import Index
from shoal_kv_cache.core.leases import Leases
from shoal_kv_cache.events import EventStream
from shoal_kv_cache.servicer import KvCacheServicer
from shoal_kv_cache.store import Store
from shoal_kv_cache.tiers.ram import RamTier

SERVICE = "kv_cache"
