"""Compiles constraints on threads of its own, each once, and keeps what it compiled."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from shoal_common import constraints
from shoal_common.constraints import LLGUIDANCE, OutputConstraint, invalid, normalise
from shoal_common.errors import Internal, MeshError

from shoal_engine.constraint import Constraint
from shoal_engine.constraints.errors import CompilerBusy, ConstraintFailed, ConstraintTimeout
from shoal_engine.constraints.grammar import grammar_of
from shoal_engine.constraints.matcher import TokenMatcher
from shoal_engine.constraints.tokenizer import GrammarTokenizer

logger = logging.getLogger(__name__)

_FIXED_BYTES = 64 * 1024
_BYTES_PER_GRAMMAR_BYTE = 128
"""Measured with 129,280 tokens: 2.4 MB for a schema of 28 kB; rounded up."""
_MAX_MESSAGE = 300
_Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerLimits:
    """What constraints may cost.

    compile_s      from the request to the compiled constraint, waiting included
    fill_s         CPU seconds of one mask; bounded by the engine's own limits too, so this is a second belt
    cache_bytes    estimated, of all compiled constraints kept
    threads        compile at once
    max_waiting    distinct constraints that wait or compile
    """

    compile_s: float = 10.0
    fill_s: float = 1.0
    cache_bytes: int = 256 * 1024 * 1024
    threads: int = 2
    max_waiting: int = 256

    def __post_init__(self) -> None:
        for name in ("compile_s", "fill_s", "cache_bytes", "threads", "max_waiting"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


def engine_limits() -> LLParserLimits:
    """Bounds of one compile and one mask in the engine's own units: the same on every machine and at any load.

    A mask of 400,000 items takes about 50 ms; 20,000 lexer states are about 40 MB.
    """
    return LLParserLimits(step_max_items=400_000, max_lexer_states=20_000, verbose_errors=False)


def announced_id() -> str:
    """The `constraint_id` of a process with this installation."""
    return constraints.constraint_id({LLGUIDANCE: version("llguidance")})


class Prototype:
    """A compiled grammar, and what is estimated that it takes. Copies of it are what matches."""

    def __init__(self, engine: LLMatcher, size_bytes: int) -> None:
        self._engine, self.size_bytes = engine, size_bytes
        self._lock = threading.Lock()

    def copy(self) -> LLMatcher:
        """A matcher that has accepted nothing."""
        with self._lock:
            return self._engine.deep_copy()


@dataclass(frozen=True, slots=True)
class CompiledConstraint:
    """A `Constraint`; may be used from any thread."""

    prototype: Prototype
    source: OutputConstraint
    tokenizer: GrammarTokenizer
    fill_s: float

    def matcher(self, *, avoids_end: bool = False) -> TokenMatcher:
        """See `Constraint.matcher`."""
        return TokenMatcher(
            self.prototype.copy,
            self.tokenizer,
            start_after_ids=self.source.start_after_ids,
            avoids_end=avoids_end,
            fill_s=self.fill_s,
        )


class ConstraintCompiler:
    """For one tokenizer. All methods may be called from any thread.

    Invariant: the kept constraints' estimated sizes add up to at most cache_bytes; equal constraints compile once at a
    time; every future is answered within compile_s.
    """

    def __init__(self, tokenizer: GrammarTokenizer, limits: CompilerLimits | None = None) -> None:
        self._tokenizer, self._limits = tokenizer, limits or CompilerLimits()
        self._pool = ThreadPoolExecutor(self._limits.threads, thread_name_prefix="shoal-constraints")
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, Prototype] = OrderedDict()
        self._kept_bytes = 0
        self._running: dict[_Key, Future[Prototype]] = {}
        self.compile_count = 0

    @property
    def kept_bytes(self) -> int:
        """Estimated size of what is kept."""
        return self._kept_bytes

    @property
    def waiting_count(self) -> int:
        """Constraints that wait or compile."""
        return len(self._running)

    def compile(self, source: OutputConstraint) -> Future[Constraint]:
        """The compiled constraint, or ConstraintInvalid, ConstraintTimeout, CompilerBusy. `source` is checked here."""
        answer: Future[Constraint] = Future()
        key = (source.kind.value, source.text)
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
            running = self._running.get(key)
            if kept is None and running is None:
                if len(self._running) >= self._limits.max_waiting:
                    answer.set_exception(CompilerBusy(f"{len(self._running)} constraints wait to be compiled"))
                    return answer
                running = self._running[key] = Future()
                self._pool.submit(self._compile, key, source, running)
        if kept is not None:
            answer.set_result(self._compiled(kept, source))
            return answer
        assert running is not None, "kept, running or begun"
        timer = threading.Timer(self._limits.compile_s, self._expire, (answer,))
        timer.daemon = True
        timer.start()
        running.add_done_callback(lambda done: self._pass_on(done, source, answer, timer))
        return answer

    def close(self) -> None:
        """Take nothing more. What is being compiled is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, key: _Key, source: OutputConstraint, running: Future[Prototype]) -> None:
        try:
            made = self._build(source)
        except MeshError as error:
            self._done(key)
            running.set_exception(error)
        except Exception as error:
            logger.error("compiling a constraint failed unexpectedly", exc_info=error)
            self._done(key)
            running.set_exception(Internal("internal error; the worker's log has the details"))
        else:
            self._done(key, made)
            running.set_result(made)

    def _build(self, source: OutputConstraint) -> Prototype:
        self.compile_count += 1
        field = f"constraint.{source.kind.value}"
        checked = normalise(source.kind, source.text, field=field)
        grammar = grammar_of(checked, self._tokenizer.special_ids)
        engine = LLMatcher(self._tokenizer.engine, grammar, log_level=0, limits=engine_limits())
        if engine.is_error():
            raise invalid(field, _short(engine.get_error()))
        # The first mask makes what every matcher would make anew, and some grammars fail at it already.
        first = np.zeros(self._tokenizer.mask_words, dtype=np.int32)
        try:
            TokenMatcher(lambda: engine, self._tokenizer, fill_s=self._limits.fill_s).fill(first)
        except ConstraintFailed as error:
            raise invalid(field, error.message) from error
        return Prototype(engine, _FIXED_BYTES + _BYTES_PER_GRAMMAR_BYTE * len(grammar.encode()))

    def _done(self, key: _Key, made: Prototype | None = None) -> None:
        with self._lock:
            self._running.pop(key, None)
            if made is None or made.size_bytes > self._limits.cache_bytes:
                return
            self._kept[key] = made
            self._kept_bytes += made.size_bytes
            while self._kept_bytes > self._limits.cache_bytes:
                self._kept_bytes -= self._kept.popitem(last=False)[1].size_bytes

    def _compiled(self, prototype: Prototype, source: OutputConstraint) -> CompiledConstraint:
        return CompiledConstraint(prototype, source, self._tokenizer, self._limits.fill_s)

    def _pass_on(
        self,
        done: Future[Prototype],
        source: OutputConstraint,
        answer: Future[Constraint],
        timer: threading.Timer,
    ) -> None:
        timer.cancel()
        error = done.exception()
        # It may have expired or been cancelled meanwhile.
        with contextlib.suppress(InvalidStateError):
            if error is None:
                answer.set_result(self._compiled(done.result(), source))
            else:
                answer.set_exception(error)

    def _expire(self, answer: Future[Constraint]) -> None:
        limit = self._limits.compile_s
        with contextlib.suppress(InvalidStateError):
            answer.set_exception(ConstraintTimeout(f"the constraint was not compiled in {limit:g} s", timeout_s=limit))


def _short(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _MAX_MESSAGE else line[:_MAX_MESSAGE] + "..."
