"""Transfer engines of others, which read a holder's memory from afar. Optional: each is imported when it is opened."""

from shoal_common.kv_transport.engines.engine import EngineFailed, Move, TransferEngine
from shoal_common.kv_transport.engines.open import ENGINES, open_engines

__all__ = ["ENGINES", "EngineFailed", "Move", "TransferEngine", "open_engines"]
