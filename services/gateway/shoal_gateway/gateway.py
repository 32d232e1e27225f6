"""The objects of one gateway and how they hang together."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping

from deepseek_recipe import Tokenizer
from shoal_common.rpc import Channels, Readiness
from shoal_common.telemetry import Metrics

from shoal_gateway.answer import Answers
from shoal_gateway.attempt import Workers
from shoal_gateway.config import GatewayConfig
from shoal_gateway.edge.opening import OpenEdge
from shoal_gateway.encode import Encoder
from shoal_gateway.fleet import Fleet
from shoal_gateway.frames_client import FramesClient
from shoal_gateway.grpc_servicer import InferenceServicer
from shoal_gateway.http.app import App
from shoal_gateway.http.chat import Chat
from shoal_gateway.http.completions import Completions
from shoal_gateway.http.description import Description
from shoal_gateway.http.endpoint import Endpoint
from shoal_gateway.http.exchange import Handler
from shoal_gateway.http.form import Prepare
from shoal_gateway.http.health import Health
from shoal_gateway.http.messages import Messages
from shoal_gateway.http.models import Models
from shoal_gateway.http.responses import Responses
from shoal_gateway.http.tokens import Tokens
from shoal_gateway.metrics import GatewayMetrics
from shoal_gateway.prefix_chains import PrefixChains
from shoal_gateway.reserve_client import ReserveClient
from shoal_gateway.running import Timeouts
from shoal_gateway.served_model import ServedModel

_SEED_BITS = 53
"""Drawn seeds survive clients whose numbers are doubles."""
# What it must reach to serve.
_SCHEDULER, _WORKER = "scheduler", "decode worker"
_ANTHROPIC_BASES = ("", "/anthropic")
_BETA_BASES = ("", "/beta")


class Gateway:
    """Everything but the listeners. Belongs to one event loop: `start`, `drain`, `close`."""

    def __init__(
        self,
        *,
        instance_id: str,
        config: GatewayConfig,
        cache_secret: str,
        model: ServedModel,
        tokenizer: Tokenizer,
        metrics: Metrics,
        direct_calls: bool = True,
    ) -> None:
        self.readiness = Readiness("nats", _SCHEDULER, _WORKER)
        counted = GatewayMetrics(metrics)
        self._channels = Channels(is_direct=direct_calls)
        self._reserve = ReserveClient(
            gateway_id=instance_id,
            channels=self._channels,
            scheduler_wait_s=config.scheduler_wait_s,
            on_change=functools.partial(self.readiness.set, _SCHEDULER),
        )
        self._frames = FramesClient(
            gateway_id=instance_id,
            channels=self._channels,
            silence_s=config.worker_silence_s,
            standstill_s=config.worker_standstill_s,
            on_change=functools.partial(self.readiness.set, _WORKER),
        )
        chains = PrefixChains(cache_secret)
        self._edge = OpenEdge(config, instance_id=instance_id, cache_secret=cache_secret, metrics=metrics)
        self.fleet = Fleet(
            reserve=self._reserve,
            frames=self._frames,
            chains=chains,
            gateways=self._edge.gateways,
        )
        encoder = Encoder(
            model,
            tokenizer,
            context=lambda: self.fleet.context_tokens or model.max_context_tokens,
            draw_seed=lambda: secrets.randbits(_SEED_BITS),
        )
        self.answers = Answers(
            model_name=config.worker_model,
            tokenizer=tokenizer,
            chains=chains,
            reserve=self._reserve,
            workers=Workers(gateway_id=instance_id, channels=self._channels, frames=self._frames, chains=chains),
            timeouts=Timeouts(start_s=config.start_timeout_s, total_s=config.request_timeout_s),
            metrics=counted,
            max_in_flight=config.max_in_flight,
        )

        def endpoint(prepare: Prepare) -> Endpoint:
            return Endpoint(
                self.answers,
                self._edge.edge,
                counted,
                prepare,
                keep_alive_s=config.keep_alive_s,
                admission_s=config.admission_s,
            )

        chat, completions = endpoint(Chat(encoder).prepare), endpoint(Completions(encoder).prepare)
        messages = Messages(encoder)
        answering = endpoint(messages.prepare)
        posts: dict[str, Handler] = {
            **{f"{base}/chat/completions": chat for base in _BETA_BASES},
            **{f"{base}/completions": completions for base in _BETA_BASES},
            "/responses": endpoint(Responses(encoder).prepare),
            **{f"{base}/messages": answering for base in _ANTHROPIC_BASES},
            **{f"{base}/messages/count_tokens": messages.count_tokens for base in _ANTHROPIC_BASES},
        }
        self.app = App(
            _routes(posts, Models(model), Tokens(encoder), Health(self.readiness)),
            self._edge.edge,
            max_body_bytes=config.max_body_bytes,
            read_timeout_s=config.read_timeout_s,
            write_timeout_s=config.write_timeout_s,
        )
        self.servicer = InferenceServicer(
            encoder,
            self.answers,
            self._edge.edge,
            metrics=counted,
            keep_alive_s=config.keep_alive_s,
            write_timeout_s=config.write_timeout_s,
        )

    def start(self) -> None:
        """Begin to watch over the streams."""
        self._reserve.start()
        self._frames.start()
        self._edge.start()

    async def close(self) -> None:
        """End all streams; what still runs is given up."""
        await self._edge.stop()
        self.answers.fail_all()
        await self._reserve.close()
        await self._frames.close()
        await self._channels.close()


def _routes(
    posts: Mapping[str, Handler], models: Models, tokens: Tokens, health: Health
) -> Mapping[str, Mapping[str, Handler]]:
    return {
        **{path: {"POST": handler} for path, handler in posts.items()},
        "/models": {"GET": models.list_all},
        "/models/": {"GET": models.get},
        "/beta/models": {"GET": models.list_all},
        "/beta/models/": {"GET": models.get},
        "/tokenize": {"POST": tokens.tokenize},
        "/detokenize": {"POST": tokens.detokenize},
        "/openapi.json": {"GET": Description().get},
        "/healthz": {"GET": health.alive},
        "/health": {"GET": health.alive},
        "/live": {"GET": health.alive},
        "/readyz": {"GET": health.ready},
        "/ready": {"GET": health.ready},
    }
