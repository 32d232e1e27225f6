"""The public gRPC client: grpcio and protobuf only."""

from shoal.common.v1.sampling_pb2 import Constraint, FinishReason, SamplingParams, Usage
from shoal.inference.v1.chat_pb2 import ChatMessage, ChatPrompt, ChatRole, Tool, ToolCall
from shoal.inference.v1.generation_pb2 import OutputForm

from shoal_client.aio_client import AioClient
from shoal_client.client import Client
from shoal_client.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    LimitReached,
    ModelNotFound,
    NotAllowed,
    ShoalError,
    Unavailable,
)
from shoal_client.requests import Prompt, Text, generation

__all__ = [
    "AioClient",
    "Cancelled",
    "ChatMessage",
    "ChatPrompt",
    "ChatRole",
    "Client",
    "Constraint",
    "DeadlineExceeded",
    "FinishReason",
    "InvalidRequest",
    "LimitReached",
    "ModelNotFound",
    "NotAllowed",
    "OutputForm",
    "Prompt",
    "SamplingParams",
    "ShoalError",
    "Text",
    "Tool",
    "ToolCall",
    "Unavailable",
    "Usage",
    "generation",
]
