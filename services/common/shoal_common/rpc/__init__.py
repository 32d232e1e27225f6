"""gRPC as every service and client of the mesh uses it."""

from shoal_common.rpc.channels import SETTLE_S, Channel, Channels, is_transport_failure
from shoal_common.rpc.direct.frames import MAX_MESSAGE_BYTES
from shoal_common.rpc.interceptors import ServerInterceptor
from shoal_common.rpc.readiness import Readiness
from shoal_common.rpc.server import AddressInUse, RpcServer, Service
from shoal_common.rpc.serving import EXIT_USAGE, refused, serve
from shoal_common.rpc.status import from_rpc_error, from_status, has_error_info, to_status

__all__ = [
    "EXIT_USAGE",
    "MAX_MESSAGE_BYTES",
    "SETTLE_S",
    "AddressInUse",
    "Channel",
    "Channels",
    "Readiness",
    "RpcServer",
    "ServerInterceptor",
    "Service",
    "from_rpc_error",
    "from_status",
    "has_error_info",
    "is_transport_failure",
    "refused",
    "serve",
    "to_status",
]
