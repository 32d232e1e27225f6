"""Compiles constraints on threads of its own, each once, and keeps what it compiled."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from shoal_common import constraints
from shoal_common.constraints import LLGUIDANCE, OutputConstraint, invalid, normalise
from shoal_common.errors import Internal, MeshError

from shoal_engine.constraint import Constraint, OutputUnfit, lead
from shoal_engine.constraints.dead_ends import refuse_dead_ends
from shoal_engine.constraints.errors import CompilerBusy, ConstraintFailed, ConstraintTimeout
from shoal_engine.constraints.grammar import grammar_of
from shoal_engine.constraints.matcher import TokenMatcher
from shoal_engine.constraints.prototype import Prototype, short
from shoal_engine.constraints.tokenizer import GrammarTokenizer

logger = logging.getLogger(__name__)

STACK_BYTES = 512 * 1024 * 1024
"""Of a compiling thread, reserved and not used: the engine recurses along references, about 10 kB for each, and a
constraint may have 20,000 parts in a chain. Its overflow would end the process."""
_Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerLimits:
    """What constraints may cost.

    compile_s      from the request to the compiled constraint, waiting included
    mask_items     parser items of one mask; 400,000 take about 50 ms
    mask_fuel      of the lexer, for one mask; 200,000 take about 15 ms
    lexer_states   that one choice's engine builds, and that all drafts of a constraint build together
    cache_bytes    estimated, of all compiled constraints kept
    threads        compile at once
    max_waiting    distinct constraints that wait or compile
    """

    compile_s: float = 10.0
    mask_items: int = 400_000
    mask_fuel: int = 200_000
    lexer_states: int = 20_000
    cache_bytes: int = 256 * 1024 * 1024
    threads: int = 2
    max_waiting: int = 256

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


def engine_limits(limits: CompilerLimits) -> LLParserLimits:
    """Bounds of an engine in its own units: the same on every machine and at any load."""
    return LLParserLimits(
        step_max_items=limits.mask_items,
        step_lexer_fuel=limits.mask_fuel,
        max_lexer_states=limits.lexer_states,
        verbose_errors=False,
    )


def announced_id() -> str:
    """The `constraint_id` of a process with this installation."""
    return constraints.constraint_id({LLGUIDANCE: version("llguidance")})


class CompiledConstraint:
    """A `Constraint` with matchers made ahead, beside the steps: behind the outputs that its choices have so far."""

    def __init__(
        self,
        prototype: Prototype,
        source: OutputConstraint,
        tokenizer: GrammarTokenizer,
        engine: Callable[[], LLMatcher],
    ) -> None:
        """`engine` makes an engine of the prototype for whoever has no stack for it."""
        self._prototype, self._source, self._tokenizer, self._engine = prototype, source, tokenizer, engine
        self._made: list[tuple[tuple[int, ...], TokenMatcher | ConstraintFailed | OutputUnfit]] = []

    def prepare(self, output: Sequence[int]) -> None:
        """Make a matcher that `matcher` will give for this output; a mask's time for every token of it."""
        made: TokenMatcher | ConstraintFailed | OutputUnfit
        made = self._new(self._prototype.engine())
        try:
            lead(made, output)
        except (ConstraintFailed, OutputUnfit) as error:
            made = error
        self._made.append((tuple(output), made))

    def matcher(self, *, avoids_end: bool = False, output: Sequence[int] = ()) -> TokenMatcher:
        """See `Constraint.matcher`."""
        wanted = tuple(output)
        place = next((i for i, (made_for, _) in enumerate(self._made) if made_for == wanted), None)
        if place is None:
            made = self._new(self._engine())
            lead(made, output)
        else:
            _, prepared = self._made.pop(place)
            if not isinstance(prepared, TokenMatcher):
                raise prepared
            made = prepared
        made.avoids_end = avoids_end
        return made

    def _new(self, engine: LLMatcher) -> TokenMatcher:
        start_ids = self._source.start_after_ids
        return TokenMatcher(engine, self._prototype, self._tokenizer, start_after_ids=start_ids)


class ConstraintCompiler:
    """For one tokenizer. All methods may be called from any thread.

    Invariant: the kept constraints' estimated sizes add up to at most cache_bytes; equal constraints compile once at a
    time; every future is answered within compile_s.
    """

    def __init__(self, tokenizer: GrammarTokenizer, limits: CompilerLimits | None = None) -> None:
        self._tokenizer, self._limits = tokenizer, limits or CompilerLimits()
        self._pool = _pool(self._limits.threads)
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

    def compile(self, source: OutputConstraint, outputs: Sequence[Sequence[int]] = ((),)) -> Future[Constraint]:
        """The compiled constraint, or ConstraintInvalid, ConstraintTimeout, CompilerBusy. `source` is checked here.

        outputs   of the choices so far: matchers for these are made here, and not where the steps wait for them
        """
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
        timer = threading.Timer(self._limits.compile_s, self._expire, (answer,))
        timer.daemon = True
        timer.start()
        answer.add_done_callback(lambda _: timer.cancel())
        if kept is not None:
            self._submit(self._serve, kept, source, outputs, answer)
        else:
            assert running is not None, "kept, running or begun"
            running.add_done_callback(lambda done: self._pass_on(done, source, outputs, answer))
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
        except BaseException as error:
            # A panic of the engine is no Exception. Whatever fails here, the constraint is what made it fail.
            logger.warning("compiling a constraint failed unexpectedly", exc_info=error)
            self._done(key)
            field = f"constraint.{source.kind.value}"
            running.set_exception(invalid(field, f"cannot be compiled: {short(str(error) or type(error).__name__)}"))
        else:
            self._done(key, made)
            running.set_result(made)

    def _build(self, source: OutputConstraint) -> Prototype:
        self.compile_count += 1
        field = f"constraint.{source.kind.value}"
        checked = normalise(source.kind, source.text, field=field)
        grammar, limits = grammar_of(checked, self._tokenizer.special_ids), engine_limits(self._limits)
        made = Prototype(grammar, self._tokenizer, limits, field, lambda one: self._submit(one.build))

        def engine(of: str) -> LLMatcher:
            return LLMatcher(self._tokenizer.engine, of, log_level=0, limits=limits)

        refuse_dead_ends(checked, grammar, self._tokenizer, engine, field)
        return made

    def _done(self, key: _Key, made: Prototype | None = None) -> None:
        with self._lock:
            self._running.pop(key, None)
            if made is None or made.size_bytes > self._limits.cache_bytes:
                return
            self._kept[key] = made
            self._kept_bytes += made.size_bytes
            while self._kept_bytes > self._limits.cache_bytes:
                self._kept_bytes -= self._kept.popitem(last=False)[1].size_bytes

    def _pass_on(
        self,
        done: Future[Prototype],
        source: OutputConstraint,
        outputs: Sequence[Sequence[int]],
        answer: Future[Constraint],
    ) -> None:
        error = done.exception()
        if error is None:
            self._submit(self._serve, done.result(), source, outputs, answer)
        else:
            _answer(answer, error)

    def _serve(
        self,
        prototype: Prototype,
        source: OutputConstraint,
        outputs: Sequence[Sequence[int]],
        answer: Future[Constraint],
    ) -> None:
        made = CompiledConstraint(
            prototype, source, self._tokenizer, lambda: self._pool.submit(prototype.engine).result()
        )
        try:
            for output in outputs:
                if answer.done():
                    return
                made.prepare(output)
        except BaseException as error:
            logger.error("making a matcher failed unexpectedly", exc_info=error)
            _answer(answer, Internal("internal error; the worker's log has the details"))
        else:
            _answer(answer, made)

    def _submit(self, work: Callable[..., None], *args: Any) -> None:
        # Closed: nobody waits any more.
        with contextlib.suppress(RuntimeError):
            self._pool.submit(work, *args)

    def _expire(self, answer: Future[Constraint]) -> None:
        limit = self._limits.compile_s
        _answer(answer, ConstraintTimeout(f"the constraint was not compiled in {limit:g} s", timeout_s=limit))


def _pool(threads: int) -> ThreadPoolExecutor:
    """With all its threads begun: their stacks are given when they begin."""
    before = threading.stack_size(STACK_BYTES)
    try:
        pool = ThreadPoolExecutor(threads, thread_name_prefix="shoal-constraints")
        all_begun = threading.Barrier(threads)
        for _ in range(threads):
            pool.submit(all_begun.wait)
    finally:
        threading.stack_size(before)
    return pool


def _answer(future: Future[Constraint], made: Constraint | BaseException) -> None:
    """Unless it has expired or been cancelled meanwhile."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(made, BaseException):
            future.set_exception(made)
        else:
            future.set_result(made)
