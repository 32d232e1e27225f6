"""What answers hold. Pure."""

from __future__ import annotations

from shoal_gateway.openapi.schema import (
    BOOLEAN,
    COUNT,
    NULL,
    NUMBER,
    STRING,
    Schema,
    answers,
    any_of,
    array,
    enum,
    nullable,
    ref,
)

_HEAD: dict[str, Schema] = {"id": STRING, "created": COUNT, "model": STRING, "system_fingerprint": NULL}
_BYTE: Schema = {"type": "integer", "minimum": 0, "maximum": 255}
_SAID = {"token": STRING, "logprob": NUMBER, "bytes": nullable(array(_BYTE))}
_FINISH = enum("stop", "length", "tool_calls")
_COUNTS = array(COUNT)

ERROR = answers({"error": answers({"message": STRING, "type": STRING, "param": nullable(STRING), "code": STRING})})
USAGE = answers(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": answers({"cached_tokens": COUNT}),
        "completion_tokens_details": answers({"reasoning_tokens": COUNT}),
        "prompt_cache_hit_tokens": COUNT,
        "prompt_cache_miss_tokens": COUNT,
        "shoal": answers(
            {
                "decode_steps": COUNT,
                "drafted_by_position": _COUNTS,
                "verified_by_position": _COUNTS,
                "accepted_by_position": _COUNTS,
            }
        ),
    }
)
_TOLD = {"token_id": COUNT, "token": STRING, "logprob": NUMBER}
SHOAL = answers(
    {
        "seed": COUNT,
        "applied": answers(
            {},
            {
                "temperature": NUMBER,
                "top_p": NUMBER,
                "top_k": COUNT,
                "min_p": NUMBER,
                "presence_penalty": NUMBER,
                "frequency_penalty": NUMBER,
                "repetition_penalty": NUMBER,
                "max_tokens": COUNT,
                "min_tokens": COUNT,
                "ignore_eos": BOOLEAN,
            },
        ),
    },
    {"prompt_logprobs": array(answers({**_TOLD, "top_logprobs": array(answers(_TOLD))}))},
)

POSITIONS = array(answers({**_SAID, "top_logprobs": array(answers(_SAID))}))
_POSITIONS = nullable(POSITIONS)
_LOGPROBS = nullable(answers({"content": _POSITIONS}, {"reasoning_content": _POSITIONS}))
_CALLED = answers({"name": STRING, "arguments": STRING})
_CALL = answers({"index": COUNT, "id": STRING, "type": enum("function"), "function": _CALLED})
_CALL_PART = answers(
    {"index": COUNT, "function": answers({}, {"name": STRING, "arguments": STRING})},
    {"id": STRING, "type": enum("function")},
)
_MESSAGE = answers(
    {"role": enum("assistant"), "content": nullable(STRING)},
    {"reasoning_content": nullable(STRING), "tool_calls": nullable(array(_CALL))},
)
_DELTA = answers(
    {},
    {
        "role": enum("assistant"),
        "content": nullable(STRING),
        "reasoning_content": nullable(STRING),
        "tool_calls": nullable(array(_CALL_PART)),
    },
)
CHAT = answers(
    {
        **_HEAD,
        "object": enum("chat.completion"),
        "choices": array(
            answers({"index": COUNT, "message": _MESSAGE, "logprobs": _LOGPROBS, "finish_reason": _FINISH}), low=1
        ),
        "usage": ref("Usage"),
        "shoal": ref("ShoalAnswer"),
    }
)
_CHAT_CHUNK = answers(
    {
        **_HEAD,
        "object": enum("chat.completion.chunk"),
        "choices": array(
            answers({"index": COUNT, "delta": _DELTA, "logprobs": _LOGPROBS, "finish_reason": nullable(_FINISH)})
        ),
        "usage": nullable(ref("Usage")),
    },
    {"shoal": ref("ShoalAnswer")},
)
CHAT_EVENT = any_of(_CHAT_CHUNK, ref("Error"))

_OLD_LOGPROBS = nullable(
    answers(
        {
            "tokens": array(STRING),
            "token_logprobs": array(nullable(NUMBER)),
            "top_logprobs": array(nullable({"type": "object", "additionalProperties": NUMBER})),
            "text_offset": array(COUNT),
        }
    )
)
_TEXT = {"text": STRING, "index": COUNT, "logprobs": _OLD_LOGPROBS}
COMPLETION = answers(
    {
        **_HEAD,
        "object": enum("text_completion"),
        "choices": array(answers({**_TEXT, "finish_reason": enum("stop", "length")}), low=1),
        "usage": ref("Usage"),
        "shoal": ref("ShoalAnswer"),
    }
)
_COMPLETION_CHUNK = answers(
    {
        **_HEAD,
        "object": enum("text_completion"),
        "choices": array(answers({**_TEXT, "finish_reason": nullable(enum("stop", "length"))})),
        "usage": nullable(ref("Usage")),
    },
    {"shoal": ref("ShoalAnswer")},
)
COMPLETION_EVENT = any_of(_COMPLETION_CHUNK, ref("Error"))

TOKENIZED = answers(
    {"tokens": array(COUNT), "count": COUNT, "max_model_len": COUNT, "token_strs": nullable(array(STRING))}
)
DETOKENIZED = answers({"prompt": STRING})
MODEL = answers({"id": STRING, "object": enum("model"), "created": COUNT, "owned_by": STRING, "max_model_len": COUNT})
MODELS = answers({"object": enum("list"), "data": array(ref("Model"), low=1)})
ALIVE = answers({"status": enum("ok")})
READY = answers({"ready": BOOLEAN, "missing": array(STRING)})


def event(name: str, *, has_done: bool) -> Schema:
    """One event of a stream: JSON, or the `[DONE]` of the last one where the API has that."""
    told: Schema = {"contentMediaType": "application/json", "contentSchema": ref(name)}
    data = {"type": "string", **(any_of({"const": "[DONE]"}, told) if has_done else told)}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}
