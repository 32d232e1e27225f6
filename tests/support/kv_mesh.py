"""Workers on one model and the kv_cache nodes they talk to, as processes: nodes come, die and come back beside them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.common.v1 import sampling_pb2
from shoal.decode.v1 import decode_service_pb2 as decode_pb
from shoal.decode.v1 import decode_service_pb2_grpc as decode_rpc
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as rpc
from shoal_common.chains import HashChain
from shoal_common.kv_transport import host_id
from shoal_engine import LLM
from shoal_engine import SamplingParams as OfflineParams
from support.kv_cluster import metric
from support.mesh import is_ready, wait_for
from support.nats_server import NatsServer, free_port
from support.service_process import ServiceProcess, service_process

MESH = "kv-mesh"
TOP_LOGPROBS = 2
TENANT = b"t" * 32
SSD_BYTES, SEGMENT_FILE_BYTES = 64 << 20, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt, how to continue it, and the chain under which it is stored."""

    prompt: tuple[int, ...]
    temperature: float = 0.0
    seed: int = 7
    max_tokens: int = 16
    root: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    tenant: bytes = TENANT

    @property
    def hashes(self) -> list[bytes]:
        """Of its full blocks."""
        return HashChain(self.root, self.prompt).hashes


@dataclass(frozen=True, slots=True)
class Said:
    """An answer: per position the token, its log-probability, and the best tokens with theirs."""

    positions: tuple[tuple[int, float, tuple[tuple[int, float], ...]], ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Without their log-probabilities."""
        return tuple(token for token, _, _ in self.positions)


@dataclass(frozen=True, slots=True)
class Told:
    """An answer of a worker, how many prompt tokens came from a cache, and how many drafts were verified."""

    said: Said
    cached: int
    drafted: int


@dataclass(slots=True)
class KvMesh:
    """Running processes. A worker `name` talks to one node for good: a node keeps its port over its lives."""

    nats: NatsServer
    folder: Path
    model: str
    stack: contextlib.ExitStack
    nodes: dict[str, ServiceProcess] = field(default_factory=dict)
    workers: dict[str, ServiceProcess] = field(default_factory=dict)
    _ports: dict[str, int] = field(default_factory=dict)

    def start_node(
        self,
        name: str,
        *,
        disk: Path | None = None,
        wrapper: Sequence[str] = (),
        module: str = "shoal_kv_cache",
        environment: Mapping[str, str] | None = None,
        **settings: str,
    ) -> ServiceProcess:
        """A node, alone or with a disk; `settings` are its own, without their prefix."""
        values = {"RAM_BYTES": str(16 << 20), "MAX_ENTRIES": "10000", "DRAIN_GRACE_S": "0.2", "NODE_ID": name}
        if disk is not None:
            values |= {
                "SSD_DIRECTORY": str(disk),
                "SSD_BYTES": str(SSD_BYTES),
                "SSD_SEGMENT_FILE_BYTES": str(SEGMENT_FILE_BYTES),
            }
        values |= {"LISTEN_ADDRESS": self.address(name), **{key.upper(): value for key, value in settings.items()}}
        log = self.folder / f"{name}-{len(list(self.folder.glob(f'{name}-*')))}.log"
        self.nodes[name] = self.stack.enter_context(
            service_process(
                module,
                log=log,
                environment={
                    **self._shared(),
                    **{f"SHOAL_KV_CACHE_{key}": value for key, value in values.items()},
                    **(environment or {}),
                },
                timeout_s=120,
                wrapper=wrapper,
            )
        )
        return self.nodes[name]

    def kill_node(self, name: str) -> None:
        """kill -9: what was in its memory is gone."""
        popen = self.nodes.pop(name).popen
        popen.kill()
        popen.wait()

    def stop_nodes(self) -> None:
        """kill -9 for all."""
        for name in list(self.nodes):
            self.kill_node(name)

    def address(self, node: str) -> str:
        """host:port of a node, whether it lives or not."""
        return f"127.0.0.1:{self._ports.setdefault(node, free_port())}"

    def start_workers(self, workers: Mapping[str, str]) -> None:
        """Decode workers and a prefill worker, by name, each with the name of its node."""

        def context(name: str, node: str) -> contextlib.AbstractContextManager[ServiceProcess]:
            role = name.split("-")[0].upper()
            prefix = f"SHOAL_{role}_WORKER_"
            environment = {
                **self._shared(),
                prefix + "MODEL": self.model,
                prefix + "KV_CACHE_ADDRESS": self.address(node),
                prefix + "ACQUIRE_TIMEOUT_S": "10",
            }
            if role == "DECODE":
                environment |= {prefix + "LOCAL_PREFILL_TOKENS": "0"}
            log = self.folder / f"{name}.log"
            return service_process(f"shoal_{role.lower()}_worker", log=log, environment=environment, timeout_s=120)

        # Side by side: imports are most of a start.
        with ThreadPoolExecutor(len(workers)) as pool:
            entered = {
                name: pool.submit(self.stack.enter_context, context(name, node)) for name, node in workers.items()
            }
        self.workers |= {name: one.result() for name, one in entered.items()}
        for name, process in self.workers.items():
            wait_for(
                lambda process=process: is_ready(process),  # type: ignore[misc]
                what=lambda name=name: f"{name} ready",  # type: ignore[misc]
                timeout_s=240,
            )

    def ask(self, worker: str, asked: Asked, *, prefill: str = "") -> Told:
        """A worker's answer; the prompt is run there, or on the prefill worker of that name."""
        targets = [
            decode_pb.PrefillTarget(instance_id=one, address=self.workers[one].address) for one in (prefill,) if one
        ]
        request = decode_pb.GenerateRequest(
            request_id=secrets.token_hex(8),
            attempt=1,
            prompt_ids=asked.prompt,
            params=sampling_pb2.SamplingParams(
                temperature=asked.temperature,
                seed=asked.seed,
                max_tokens=asked.max_tokens,
                ignore_eos=True,
                top_logprobs=TOP_LOGPROBS,
            ),
            cache_root=asked.root,
            tenant_tag=asked.tenant,
            prefill_targets=targets,
        )
        positions: list[tuple[int, float, tuple[tuple[int, float], ...]]] = []
        with grpc.insecure_channel(self.workers[worker].address) as channel:
            for event in decode_rpc.DecodeServiceStub(channel).Generate(request, timeout=60):
                for one in (one for entry in event.entries.entries for one in entry.logprobs):
                    top = tuple((best.token_id, best.logprob) for best in one.top)
                    positions.append((one.emitted.token_id, one.emitted.logprob, top))
                if event.HasField("ended"):
                    usage = event.ended.usage
                    assert len(positions) == usage.completion_tokens
                    return Told(Said(tuple(positions)), usage.cached_prompt_tokens, usage.draft_tokens)
        raise AssertionError("the call ended without an end")

    def wait_put(self) -> None:
        """Until nothing waits to be stored at the workers."""
        _wait_zero(self.workers, "shoal_kv_write_waiting_bytes")

    def wait_written(self) -> None:
        """As `wait_put`, and until nothing waits for a slower tier of a node."""
        self.wait_put()
        _wait_zero(self.nodes, "shoal_kv_cache_queued_bytes")

    def stub(self, node: str) -> Any:
        """Calls of a node."""
        channel = self.stack.enter_context(grpc.insecure_channel(self.nodes[node].address))
        return rpc.KvCacheServiceStub(channel)

    def stats(self, node: str) -> pb.GetStatsResponse:
        """Counts of a node."""
        stats: pb.GetStatsResponse = self.stub(node).GetStats(pb.GetStatsRequest(), timeout=10)
        return stats

    def tier(self, node: str, tier: pb.Tier.ValueType) -> pb.TierStats:
        """Counts of one tier of a node."""
        return next(one for one in self.stats(node).tiers if one.tier == tier)

    def held(self, node: str) -> tuple[set[bytes], set[bytes]]:
        """Hashes of the blocks and of the snapshots that a node has in memory or on disk."""
        blocks: set[bytes] = set()
        snapshots: set[bytes] = set()
        for message in self.stub(node).ListHeld(pb.ListHeldRequest(), timeout=10):
            blocks.update(message.page.block_hashes)
            snapshots.update(message.page.snapshot_hashes)
        return blocks, snapshots

    def acquire(self, node: str, asked: Asked) -> pb.AcquireResponse:
        """What a node offers of a chain; let go at once."""
        stub = self.stub(node)
        group = stub.ListGroups(pb.ListGroupsRequest(), timeout=10).groups[0]
        request = pb.AcquireRequest(
            lease_id=secrets.token_hex(8),
            owner_id="test",
            kv_id=group.kv_id,
            numerics_id=group.numerics_id,
            tenant_tag=asked.tenant,
            block_hashes=asked.hashes,
            max_hit_tokens=len(asked.hashes) * 128,
            offer=transport_pb.TransportOffer(kinds=[transport_pb.TRANSPORT_KIND_SHM], host_id=host_id()),
        )
        answer: pb.AcquireResponse = stub.Acquire(request, timeout=10)
        stub.Release(pb.ReleaseRequest(lease_id=request.lease_id), timeout=10)
        return answer

    def wait_for_peers(self) -> None:
        """Until every node knows exactly the others."""
        wanted = {name: len(self.nodes) - 1.0 for name in self.nodes}

        def known() -> dict[str, float]:
            return {name: metric(node, "shoal_kv_cache_peers") for name, node in self.nodes.items()}

        wait_for(lambda: known() == wanted, what=lambda: f"peers {wanted}, not {known()}", timeout_s=60)

    def report(self, node: str, kind: transport_pb.PayloadKind.ValueType, block_hash: bytes) -> None:
        """Tell a node that a payload of its only group is damaged."""
        stub = self.stub(node)
        (group,) = stub.ListGroups(pb.ListGroupsRequest(), timeout=10).groups
        request = pb.ReportCorruptRequest(
            kind=kind,
            block_hash=block_hash,
            kv_id=group.kv_id,
            numerics_id=group.numerics_id,
            tenant_tag=group.tenant_tag,
        )
        stub.ReportCorrupt(request, timeout=10)

    def _shared(self) -> dict[str, str]:
        return {"SHOAL_MESH": MESH, "SHOAL_NATS_URL": self.nats.url}


def _wait_zero(processes: Mapping[str, ServiceProcess], name: str) -> None:
    def waiting() -> dict[str, float]:
        return {one: size for one, process in processes.items() if (size := metric(process, name))}

    wait_for(lambda: not waiting(), what=lambda: f"{name} at 0: {waiting()}", timeout_s=30)


def ask_offline(llm: LLM, all_asked: Sequence[Asked]) -> list[Said]:
    """The answers of the model in this process, which knows of no cache."""
    params = [
        OfflineParams(
            temperature=one.temperature,
            seed=one.seed,
            max_tokens=one.max_tokens,
            ignore_eos=True,
            top_logprobs=TOP_LOGPROBS,
        )
        for one in all_asked
    ]
    prompts = [list(one.prompt) for one in all_asked]
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, decode_sequence=False)
    return [
        Said(
            tuple(
                (one.emitted.token_id, one.emitted.logprob, tuple((best.token_id, best.logprob) for best in one.top))
                for one in output.outputs[0].logprobs
            )
        )
        for output in outputs
    ]


@contextlib.contextmanager
def kv_mesh(folder: Path, *, model: str, workers: Mapping[str, str]) -> Iterator[KvMesh]:
    """Workers by name ("decode-1", "prefill-1"), each with its node's, up and ready; nodes come by `start_node`."""
    nats = NatsServer(folder / "nats")
    nats.start()
    with contextlib.ExitStack() as stack:
        stack.callback(nats.stop)
        started = KvMesh(nats, folder, model, stack)
        started.start_workers(workers)
        yield started
