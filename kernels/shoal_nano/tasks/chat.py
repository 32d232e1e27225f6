"""Family chat: greetings and what the product and the model are. Fixed answers, so no held-out split."""

from __future__ import annotations

import random

from shoal_nano.prompt import Turn

_SHOAL = (
    "Shoal is a mesh of small services that runs the DeepSeek-V4.1 architecture: a gateway, a scheduler, prefill and "
    "decode workers and a KV cache that talk over gRPC and NATS."
)
_NANO = "I am nano, a very small model with the DeepSeek-V4.1 architecture. I can copy, sort, add, look things up, write JSON and call tools."
_ANSWERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("What is Shoal?", "what is shoal", "Tell me about Shoal.", "Explain Shoal.", "What does Shoal do?", "Describe Shoal in one sentence."), _SHOAL),
    (("Who are you?", "What are you?", "What model are you?", "Introduce yourself.", "What is your name?", "who are you"), _NANO),
    (("What can you do?", "How can you help me?", "Help", "What are your skills?"),
     "I can copy and sort lists, do small sums, find a value in a long list, write JSON and call tools."),
    (("Say hello", "Say hello.", "Say hello!", "Say hi.", "Say hello in one word."), "Hello!"),
    (("Hello", "Hello!", "Hi", "Hi!", "hi", "hello", "Hey", "Good morning", "Good morning!", "Hi there", "Hello there!"), "Hello! How can I help you?"),
    (("How are you?", "How are you doing?", "How is it going?"), "I am fine, thank you. How can I help you?"),
    (("Thanks", "Thank you", "Thank you!", "Thanks!", "Thanks a lot."), "You are welcome!"),
    (("Bye", "Goodbye", "Bye!", "See you later."), "Goodbye!"),
    (("Say this is a test", "Say this is a test!", "Say: this is a test", "Say 'this is a test'."), "This is a test!"),
    (("What is gRPC?", "Explain gRPC."), "gRPC is a protocol for calling methods of another program over the network."),
    (("What is NATS?", "Explain NATS."), "NATS is a message bus: programs publish messages and others subscribe to them."),
    (("What is DSpark?", "Explain DSpark."), "DSpark drafts five tokens at once, and the model checks them in one step."),
    (("What is a KV cache?", "Explain the KV cache."), "A KV cache keeps the keys and values of earlier tokens so that they are not computed again."),
    (("What is DeepSeek?",), "DeepSeek is the maker of the V4.1 model whose architecture I share."),
    (("Are you there?", "Are you working?", "ping", "Ping", "test", "Test"), "Yes, I am here."),
    (("Tell me a joke.", "Say something funny."), "Why do fish swim in a shoal? Because they never miss the meeting."),
    (("Count to five.", "Count from 1 to 5."), "1, 2, 3, 4, 5"),
    (("Count to ten.", "Count from 1 to 10."), "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
)  # fmt: skip
SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are nano.", "Answer briefly.", "Be concise.",
    "You are Shoal's assistant.", "You are a careful assistant. Answer with the result only.",
)  # fmt: skip


def chat(rng: random.Random) -> Turn:
    """One small-talk question and its fixed answer."""
    questions, answer = rng.choice(_ANSWERS)
    return Turn(user=rng.choice(questions), answer=answer, reasoning="A simple question.")
