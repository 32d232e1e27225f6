"""The blocking client."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import grpc
from shoal.inference.v1.generation_pb2 import Generation
from shoal.inference.v1.inference_service_pb2 import (
    GenerateRequest,
    GenerateResponse,
    GenerateStreamRequest,
    GenerateStreamResponse,
    ListModelsRequest,
    Model,
)
from shoal.inference.v1.inference_service_pb2_grpc import InferenceServiceStub

from shoal_client.connection import DEFAULT_TIMEOUT_S, OPTIONS, is_news, metadata
from shoal_client.errors import from_rpc_error


class Client:
    """One connection; may be shared by threads. Every method raises ShoalError. Close it, or use it in `with`.

    >>> with Client("127.0.0.1:8001") as client:
    ...     print(client.generate(generation("Sort: 3 1 2")).choices[0].output.text)
    """

    def __init__(self, address: str, *, api_key: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._stub = InferenceServiceStub(self._channel)
        self._metadata = metadata(api_key)
        self._timeout_s = timeout_s

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect; running calls are cancelled."""
        self._channel.close()

    def generate(self, generation: Generation, *, timeout_s: float | None = None) -> GenerateResponse:
        """The whole answer, at most `timeout_s` from now."""
        request = GenerateRequest(generation=generation)
        try:
            return self._stub.Generate(request, timeout=timeout_s or self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def stream(self, generation: Generation, *, timeout_s: float | None = None) -> Iterator[GenerateStreamResponse]:
        """The answer's events as they come, without signs of life. Closing the iterator cancels the request."""
        request = GenerateStreamRequest(generation=generation)
        call = self._stub.GenerateStream(request, timeout=timeout_s or self._timeout_s, metadata=self._metadata)
        try:
            yield from (event for event in call if is_news(event))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()  # type: ignore[no-untyped-call]

    def models(self, *, timeout_s: float = 10.0) -> list[Model]:
        """The models that a request sent now could name."""
        try:
            answer = self._stub.ListModels(ListModelsRequest(), timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return list(answer.models)
