"""One answer: the whole mesh gives the tokens of the offline model, whatever way they come."""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest
from shoal.common.v1 import sampling_pb2
from shoal.common.v1.tokens_pb2 import TokenIds
from shoal.decode.v1 import decode_service_pb2 as pb
from shoal.decode.v1 import decode_service_pb2_grpc as rpc
from shoal.inference.v1 import generation_pb2
from shoal_client import Client, InvalidRequest, SamplingParams, generation
from shoal_common.errors import InvalidArgument
from shoal_engine import LLM
from shoal_engine import SamplingParams as OfflineParams
from support.asking import Question, ask, ask_offline
from support.mesh import Mesh, wait_for
from support.seldom import seldom
from support.worker_pair import counted, prompt_of

pytestmark = pytest.mark.timeout(300)

# Around ratio 2, the window (16), the replay length (28), one block, block + replay, and where prefill turns remote.
LENGTHS = (1, 2, 16, 29, 127, 129, 156, 201, 257, 412)


@pytest.mark.parametrize("temperature", [1.0, *seldom(0.0)])
def test_the_mesh_gives_the_tokens_of_the_offline_model_at_every_length(
    client: Client, offline: LLM, temperature: float
) -> None:
    questions = [
        Question(prompt=tuple(prompt_of(length, seed=length)), temperature=temperature, seed=length)
        for length in LENGTHS
    ]
    wanted = ask_offline(offline, questions)
    told = [ask(client, question).tokens for question in questions]
    assert dict(zip(LENGTHS, told, strict=True)) == dict(zip(LENGTHS, wanted, strict=True))


def test_long_prompts_are_prefilled_remotely_and_short_ones_locally(whole: Mesh, client: Client) -> None:
    before = whole.numbers("prefill_worker")["step_count"]
    ask(client, Question(prompt=tuple(prompt_of(100, seed=60)), user_id=secrets.token_hex(8)))
    assert whole.numbers("prefill_worker")["step_count"] == before
    ask(client, Question(prompt=tuple(prompt_of(300, seed=60)), user_id=secrets.token_hex(8)))
    assert whole.numbers("prefill_worker")["step_count"] > before


def test_many_requests_at_once_get_the_tokens_that_each_gets_alone(client: Client, offline: LLM) -> None:
    questions = [
        Question(prompt=tuple(prompt_of(10 + 53 * index, seed=70 + index)), seed=index, n=1 + index % 2)
        for index in range(10)
    ]
    wanted = ask_offline(offline, questions)
    with ThreadPoolExecutor(len(questions)) as pool:
        told = list(pool.map(lambda question: ask(client, question).tokens, questions))
    assert told == wanted


def test_a_hit_gives_the_tokens_of_the_cold_prompt(client: Client, offline: LLM) -> None:
    question = Question(prompt=tuple(prompt_of(430, seed=80)), seed=5, user_id=secrets.token_hex(8))
    [wanted] = ask_offline(offline, [question])
    cold = ask(client, question)
    assert (cold.cached, cold.tokens) == (0, wanted)
    hits = []

    def is_hit() -> bool:
        hits.append(ask(client, question))
        return hits[-1].cached == 384

    wait_for(is_hit, what=lambda: f"a hit of 384 tokens, cached were {[hit.cached for hit in hits]}")
    assert {hit.tokens for hit in hits} == {wanted}


def test_choices_have_seeds_of_their_own_and_the_first_has_the_requests(client: Client) -> None:
    prompt = tuple(prompt_of(40, seed=81))
    alone = ask(client, Question(prompt=prompt, seed=9)).tokens
    both = ask(client, Question(prompt=prompt, seed=9, n=2)).tokens
    assert both[0] == alone[0]
    assert both[1] != both[0]


def test_a_worker_called_directly_with_tokens_so_far_continues_the_answer_of_the_mesh(
    whole: Mesh, client: Client
) -> None:
    question = Question(prompt=tuple(prompt_of(170, seed=82)), seed=13, max_tokens=60)
    [answer] = ask(client, question).tokens
    with grpc.insecure_channel(whole["decode_worker"].address) as channel:
        for so_far in (1, 17, 59):
            request = pb.GenerateRequest(
                request_id=secrets.token_hex(8),
                attempt=1,
                prompt_ids=question.prompt,
                params=sampling_pb2.SamplingParams(temperature=1.0, seed=13, max_tokens=60, ignore_eos=True),
                choices=[pb.ChoiceState(output_ids=answer[:so_far])],
            )
            events = list(rpc.DecodeServiceStub(channel).Generate(request, timeout=30))
            rest = [one for event in events for entry in event.entries.entries for one in entry.token_ids]
            assert tuple(rest) == answer[so_far:], f"after {so_far} tokens"


PENALTIES = {"presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7, "top_p": 0.9},
    "cut": {"top_k": 20, "min_p": 0.02},
    "penalties": {**PENALTIES},
    "logit bias": {"logit_bias": {7: 6.0, 11: 5.0, 5: -100.0}},
    "bad words": {"logit_bias": {7: 8.0, 11: 8.0}, "bad_words": [[7, 7], [11, 7, 11], [11, 11, 11]]},
    "forced": {"forced_ids": [17, 4, 4, 250, 9]},
    "min tokens": {"min_tokens": 5, "stop_token_ids": list(range(100, 164))},
    "end of sequence": {"ignore_eos": False, "min_tokens": 4, "logit_bias": {1: 5.0}},
}
Position = tuple[int, float, tuple[tuple[int, float], ...]]


def ask_kind(client: Client, name: str, n: int) -> tuple[list[tuple[int, ...]], list[list[Position]]]:
    """Tokens and log-probabilities of every choice, from the mesh."""
    fields = {"seed": 5, "max_tokens": 12, "ignore_eos": True, "top_logprobs": 2, **KINDS[name]}
    fields["bad_words"] = [TokenIds(ids=word) for word in fields.get("bad_words", ())]
    answer = client.generate(generation(prompt_of(40, seed=90), sampling=SamplingParams(**fields), n=n))
    outputs = [choice.output for choice in answer.choices]
    shown = [
        [(p.emitted.token_id, p.emitted.logprob, tuple((t.token_id, t.logprob) for t in p.top)) for p in out.logprobs]
        for out in outputs
    ]
    return [tuple(out.tokens.ids) for out in outputs], shown


def ask_kind_offline(llm: LLM, name: str, n: int) -> tuple[list[tuple[int, ...]], list[list[Position]]]:
    """The same from the model in this process."""
    fields = {"seed": 5, "max_tokens": 12, "ignore_eos": True, "top_logprobs": 2, **KINDS[name]}
    (answer,) = llm.generate(
        prompt_token_ids=[prompt_of(40, seed=90)], sampling_params=OfflineParams(n=n, **fields), decode_sequence=False
    )
    shown = [
        [(p.emitted.token_id, p.emitted.logprob, tuple((t.token_id, t.logprob) for t in p.top)) for p in out.logprobs]
        for out in answer.outputs
    ]
    return [out.token_ids for out in answer.outputs], shown


def test_every_way_to_sample_gives_the_offline_tokens_and_logprobs_of_one_and_of_four_choices(
    client: Client, offline: LLM
) -> None:
    with ThreadPoolExecutor(len(KINDS)) as pool:
        four = dict(zip(KINDS, pool.map(lambda name: ask_kind(client, name, 4), KINDS), strict=True))
        one = dict(zip(KINDS, pool.map(lambda name: ask_kind(client, name, 1), KINDS), strict=True))
    for name in KINDS:
        assert four[name] == ask_kind_offline(offline, name, 4), name
        assert one[name] == (four[name][0][:1], four[name][1][:1]), name


def test_a_prompt_s_tokens_are_reported_as_offline_and_not_beyond_the_replay(client: Client, offline: LLM) -> None:
    prompt = prompt_of(28, seed=91)
    (wanted,) = offline.generate(
        prompt_token_ids=[prompt],
        sampling_params=OfflineParams(prompt_logprobs=2, max_tokens=3, seed=1, ignore_eos=True),
        decode_sequence=False,
    )
    sampling = SamplingParams(prompt_logprobs=2, max_tokens=3, seed=1, ignore_eos=True)
    for _ in range(2):
        answer = client.generate(generation(prompt, sampling=sampling, n=2))
        first, second = (choice.output for choice in answer.choices)
        told = [
            (p.emitted.token_id, p.emitted.logprob, [(t.token_id, t.logprob) for t in p.top])
            for p in first.prompt_logprobs
        ]
        assert told == [
            (p.emitted.token_id, p.emitted.logprob, [(t.token_id, t.logprob) for t in p.top])
            for p in wanted.prompt_logprobs
        ]
        assert [token for token, _, _ in told] == prompt[1:]
        assert not second.prompt_logprobs
        assert tuple(first.tokens.ids) == wanted.outputs[0].token_ids
    with pytest.raises(InvalidRequest) as caught:
        client.generate(generation(prompt_of(29, seed=91), sampling=sampling))
    assert caught.value.reason == "PROMPT_LOGPROBS_NEED_FULL_REPLAY"
    with pytest.raises(InvalidArgument) as refused:
        offline.generate(prompt_token_ids=[prompt_of(29, seed=91)], sampling_params=OfflineParams(prompt_logprobs=2))
    assert refused.value.reason == "PROMPT_LOGPROBS_NEED_FULL_REPLAY"


def test_a_repeated_prompt_is_reported_over_http_as_over_grpc(whole: Mesh, client: Client) -> None:
    prompt = prompt_of(28, seed=91)
    sampling = SamplingParams(prompt_logprobs=2, top_logprobs=2, max_tokens=3, seed=1, ignore_eos=True)
    told = client.generate(generation(prompt, sampling=sampling)).choices[0].output
    body = {"model": "deepseek-flash", "prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 3, "seed": 1}
    url = f"{whole.http}/v1/completions"
    answer = httpx.post(url, json={**body, "ignore_eos": True}, timeout=30)
    (choice,) = answer.json()["choices"]
    shown = choice["logprobs"]
    wanted = [p.emitted.logprob for p in [*told.prompt_logprobs, *told.logprobs]]
    assert shown["token_logprobs"] == [None, *(pytest.approx(one) for one in wanted)]
    assert shown["top_logprobs"][0] is None
    assert {len(best) for best in shown["top_logprobs"][1:]} <= {2, 3}
    beyond = httpx.post(url, json={**body, "prompt": prompt_of(29, seed=91)}, timeout=30)
    assert (beyond.status_code, beyond.json()["error"]["code"]) == (400, "prompt_logprobs_need_full_replay")
    unscored = httpx.post(url, json={**body, "prompt": prompt_of(29, seed=91), "logprobs": None}, timeout=30)
    assert unscored.status_code == 200


def test_a_bad_word_that_is_forced_is_the_caller_s_mistake(client: Client) -> None:
    words = [TokenIds(ids=[3]), TokenIds(ids=[200, 5])]
    sampling = SamplingParams(bad_words=words, forced_ids=[7, 200, 5], max_tokens=8, seed=1)
    with pytest.raises(InvalidRequest) as caught:
        client.generate(generation(prompt_of(20, seed=92), sampling=sampling))
    assert "bad_words[1]" in str(caught.value)


def test_an_exact_answer_is_given_where_kernels_are_invariant(client: Client) -> None:
    answer = client.generate(generation(prompt_of(20), sampling=SamplingParams(max_tokens=4), is_exact=True))
    assert answer.tail.exact


def test_drafts_are_counted_by_position_in_the_usage_and_in_the_metrics(whole: Mesh, client: Client) -> None:
    sampling = SamplingParams(max_tokens=40, seed=4, temperature=0, ignore_eos=True)
    usage = client.generate(generation(prompt_of(30, seed=93), sampling=sampling)).tail.usage
    assert sum(usage.verified_by_position) == usage.draft_tokens
    assert sum(usage.accepted_by_position) == usage.accepted_draft_tokens
    assert list(usage.drafted_by_position) == sorted(usage.drafted_by_position, reverse=True)
    assert len(usage.drafted_by_position) == 5
    for position, count in enumerate(usage.verified_by_position, start=1):
        told = counted(whole["decode_worker"], "shoal_decode_verified_draft_tokens", position=str(position))
        assert asyncio.run(told) >= count


def test_a_stop_string_cuts_each_choice_where_its_own_text_has_it_and_changes_nothing_before(client: Client) -> None:
    # Letters only: other tokens of this model are parts of characters, whose text is not settled before the next one.
    letters = dict.fromkeys(range(74, 100), 100.0)
    sampling = SamplingParams(
        temperature=0.8, top_p=0.95, seed=6, max_tokens=40, ignore_eos=True, top_logprobs=0, logit_bias=letters
    )

    def told(stop: list[str]) -> list[Any]:
        asked = generation(
            prompt_of(30, seed=94),
            sampling=sampling,
            n=4,
            stop=stop,
            output_form=generation_pb2.OUTPUT_FORM_TEXT_AND_TOKENS,
        )
        return [choice.output for choice in client.generate(asked).choices]

    whole = told([])
    stop = whole[0].text[20:22]
    assert len(whole[0].text) == 40
    for cut, full in zip(told([stop]), whole, strict=True):
        assert cut.text == full.text.partition(stop)[0]
        count = len(cut.tokens.ids)
        assert list(cut.tokens.ids) == list(full.tokens.ids)[:count]
        assert list(cut.logprobs) == list(full.logprobs)[:count]
