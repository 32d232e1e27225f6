"""What bodies may hold. Bounds are those of the modules that read them. Pure."""

from __future__ import annotations

from shoal_common.constraints import MAX_TEXT_BYTES
from shoal_common.sampling_limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_FORCED_IDS, MAX_TOP_LOGPROBS

from shoal_gateway.chat_fields import (
    MAX_BAD_WORD_BYTES,
    MAX_BIASES,
    MAX_CACHE_POINTS,
    MAX_CHOICES,
    MAX_MESSAGE_INDEX,
    MAX_SEED,
    MAX_STOP_TOKENS,
    MAX_TOKENS,
    MAX_USER_ID_BYTES,
)
from shoal_gateway.completion_fields import MAX_PROMPT_BYTES, MAX_PROMPTS, MAX_STOP_BYTES, MAX_STOPS
from shoal_gateway.openapi.schema import (
    BOOLEAN,
    COUNT,
    STRING,
    accepts,
    any_of,
    array,
    enum,
    integer,
    nullable,
    number,
    positive_number,
    ref,
    some_text,
    text,
)

MAX_MODEL_BYTES = 256
MAX_TEXT_OF_TOKENIZE = 16 * 1024 * 1024
_MODEL = text(MAX_MODEL_BYTES)
_TOKEN_IDS = array(COUNT)

_STREAM = {"stream": BOOLEAN, "stream_options": accepts({"include_usage": BOOLEAN})}
_SAMPLING = {
    "n": integer(1, MAX_CHOICES),
    "seed": integer(0, MAX_SEED),
    "max_tokens": integer(1, MAX_TOKENS),
    "min_tokens": integer(0, MAX_TOKENS),
    "temperature": number(0, 2),
    "top_p": positive_number(1),
    "top_k": integer(0, 2**31),
    "min_p": number(0, 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(0.01, 100),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": nullable(number(-100, 100)),
        "maxProperties": MAX_BIASES,
    },
    "ignore_eos": BOOLEAN,
    "user_id": text(MAX_USER_ID_BYTES),
    "shoal": ref("ShoalRequest"),
}

SHOAL = accepts(
    {
        "sampling": enum("as_sent"),
        "seed": integer(0, MAX_SEED),
        "determinism": enum("exact", "best_effort"),
        "ignore_eos": BOOLEAN,
        "stop_token_ids": array(COUNT, high=MAX_STOP_TOKENS),
        "bad_words": array(
            any_of(some_text(MAX_BAD_WORD_BYTES), array(COUNT, low=1, high=MAX_BAD_WORD_TOKENS)), high=MAX_BAD_WORDS
        ),
        "forced_ids": array(COUNT, high=MAX_FORCED_IDS),
        "prompt_logprobs": integer(0, MAX_TOP_LOGPROBS),
        "cache_points": array(integer(0, MAX_MESSAGE_INDEX), high=MAX_CACHE_POINTS),
        "ebnf": text(MAX_TEXT_BYTES),
    },
    is_closed=True,
)

RESPONSE_FORMAT = any_of(
    accepts({}, {"type": enum("text", "json_object")}),
    accepts(
        {},
        {
            "type": enum("json_schema"),
            "json_schema": accepts({"name": STRING, "strict": BOOLEAN}, {"schema": {"type": "object"}}),
        },
    ),
    accepts({}, {"type": enum("regex"), "regex": text(MAX_TEXT_BYTES)}),
)

_CONTENT = any_of(STRING, array(accepts({}, {"type": enum("text"), "text": STRING})))
_FUNCTION = accepts({}, {"name": STRING, "arguments": STRING})
_CALL = accepts({}, {"id": STRING, "type": enum("function"), "function": _FUNCTION})
MESSAGE = any_of(
    accepts({"name": STRING}, {"role": enum("system", "developer", "user", "latest_reminder"), "content": _CONTENT}),
    accepts(
        {
            "content": _CONTENT,
            "reasoning_content": STRING,
            "tool_calls": array(_CALL, low=1),
            "prefix": BOOLEAN,
            "name": STRING,
        },
        {"role": enum("assistant")},
    ),
    accepts({}, {"role": enum("tool"), "content": _CONTENT, "tool_call_id": STRING}),
)
TOOL_NAME = {"type": "string", "minLength": 1, "pattern": "^[a-zA-Z0-9_-]+$"}
TOOL = accepts(
    {},
    {
        "type": enum("function"),
        "function": accepts(
            {"description": STRING, "parameters": {"type": "object"}, "strict": BOOLEAN}, {"name": TOOL_NAME}
        ),
    },
)
_TOOL_CHOICE = any_of(
    enum("none", "auto", "required"),
    accepts({}, {"type": enum("function"), "function": accepts({}, {"name": STRING})}),
)
EFFORT = any_of(integer(1, 100), enum("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"))
_STOP = any_of({"type": "string", "minLength": 1}, array({"type": "string", "minLength": 1}, high=MAX_STOPS))

CHAT = accepts(
    {
        **_SAMPLING,
        **_STREAM,
        "max_completion_tokens": integer(1, MAX_TOKENS),
        "stop": _STOP,
        "logprobs": BOOLEAN,
        "top_logprobs": integer(0, MAX_TOP_LOGPROBS),
        "tools": array(ref("Tool")),
        "tool_choice": _TOOL_CHOICE,
        "parallel_tool_calls": BOOLEAN,
        "thinking": accepts({"budget_tokens": COUNT}, {"type": enum("enabled", "disabled", "adaptive")}),
        "reasoning_effort": EFFORT,
        "response_format": ref("ResponseFormat"),
    },
    {"model": _MODEL, "messages": array(ref("Message"), low=1)},
    ignored=(
        "audio",
        "function_call",
        "functions",
        "metadata",
        "modalities",
        "moderation",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
        "web_search_options",
    ),
)

COMPLETION = accepts(
    {
        **_SAMPLING,
        **_STREAM,
        "suffix": text(MAX_PROMPT_BYTES),
        "echo": BOOLEAN,
        "logprobs": integer(0, MAX_TOP_LOGPROBS),
        "best_of": integer(1, MAX_CHOICES),
        "stop": any_of(some_text(MAX_STOP_BYTES), array(some_text(MAX_STOP_BYTES), high=MAX_STOPS)),
        "response_format": ref("ResponseFormat"),
    },
    {
        "model": _MODEL,
        "prompt": any_of(
            text(MAX_PROMPT_BYTES),
            array(COUNT, low=1),
            array(text(MAX_PROMPT_BYTES), low=1, high=MAX_PROMPTS),
            array(array(COUNT, low=1), low=1, high=MAX_PROMPTS),
        ),
    },
    ignored=("user",),
)

TOKENIZE = any_of(
    accepts(
        {"model": _MODEL, "add_special_tokens": BOOLEAN, "return_token_strs": BOOLEAN},
        {"prompt": text(MAX_TEXT_OF_TOKENIZE)},
    ),
    accepts(
        {"model": _MODEL, "return_token_strs": BOOLEAN, "tools": array(ref("Tool"))},
        {"messages": array(ref("Message"), low=1)},
    ),
)
DETOKENIZE = accepts({"model": _MODEL}, {"tokens": _TOKEN_IDS})
