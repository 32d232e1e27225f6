"""One answer: the whole mesh gives the tokens of the offline model, whatever way they come."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from shoal.common.v1 import sampling_pb2
from shoal.decode.v1 import decode_service_pb2 as pb
from shoal.decode.v1 import decode_service_pb2_grpc as rpc
from shoal_client import Client
from shoal_engine import LLM
from support.asking import Question, ask, ask_offline
from support.mesh import Mesh, wait_for
from support.worker_pair import prompt_of

pytestmark = pytest.mark.timeout(300)

# Around ratio 2, the window (16), the replay length (28), one block, block + replay, and where prefill turns remote.
LENGTHS = (1, 2, 16, 29, 127, 129, 156, 201, 257, 412)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
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
