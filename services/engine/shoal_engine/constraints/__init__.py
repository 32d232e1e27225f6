"""Constraints compiled and matched: the one place that knows a grammar engine. Imports llguidance."""

from shoal_engine.constraints.compiler import CompilerLimits, ConstraintCompiler, announced_id
from shoal_engine.constraints.errors import ConstraintFailed, ConstraintTimeout
from shoal_engine.constraints.tokenizer import GrammarTokenizer

__all__ = [
    "CompilerLimits",
    "ConstraintCompiler",
    "ConstraintFailed",
    "ConstraintTimeout",
    "GrammarTokenizer",
    "announced_id",
]
