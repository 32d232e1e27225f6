"""The head and the Markov loop of compiled operations."""

from __future__ import annotations

from functools import partial

from shoal_kernels.ops.lm_head import reference

lm_head_argmax = partial(reference.lm_head_argmax, backend="cpu")
markov_loop = partial(reference.markov_loop, backend="cpu")
