"""Family tool: choose one of the given tools and call it in DSML syntax, then answer from its result."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from shoal_nano.prompt import Call, Turn
from shoal_nano.tasks.words import CITIES, FIRST_NAMES, code, word


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    text: str
    arguments: dict[str, object]
    result: str
    reply: str


_SPECS: dict[str, tuple[str, dict[str, str]]] = {
    "get_weather": ("Get the current weather of a city.", {"city": "string"}),
    "get_time": ("Get the local time of a city.", {"city": "string"}),
    "search": ("Search the web.", {"query": "string"}),
    "add": ("Add two numbers.", {"a": "integer", "b": "integer"}),
    "multiply": ("Multiply two numbers.", {"a": "integer", "b": "integer"}),
    "send_message": ("Send a message to a person.", {"to": "string", "text": "string"}),
    "read_file": ("Read a file.", {"path": "string"}),
    "set_timer": ("Start a timer.", {"minutes": "integer"}),
    "get_order": ("Look up an order by its id.", {"order_id": "string"}),
    "set_light": ("Switch a light on or off.", {"room": "string", "on": "boolean"}),
    "translate": ("Translate a word.", {"text": "string", "language": "string"}),
    "get_stock": ("Get the price of a stock.", {"symbol": "string"}),
}


def _request(rng: random.Random, name: str) -> _Request:
    city, number, other = rng.choice(CITIES), rng.randint(1, 999), rng.randint(1, 99)
    if name == "get_weather":
        sky, degrees = rng.choice(("sunny", "cloudy", "rainy", "windy")), rng.randint(-5, 35)
        ask = rng.choice(("What is the weather in {}?", "How is the weather in {}?", "Weather in {}", "Is it raining in {}?",
                          "What's the weather like in {}?"))  # fmt: skip
        return _Request(text=ask.format(city), arguments={"city": city}, result=f"{sky}, {degrees} degrees",
                        reply=f"The weather in {city} is {sky}, {degrees} degrees.")  # fmt: skip
    if name == "get_time":
        time = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
        ask = rng.choice(("What time is it in {}?", "Tell me the time in {}."))
        return _Request(text=ask.format(city), arguments={"city": city}, result=time, reply=f"It is {time} in {city}.")
    if name == "search":
        query = " ".join(word(rng) for _ in range(rng.randint(1, 4)))
        found = word(rng)
        ask = rng.choice(("Search for {}.", "Search the web for {}.", "Find pages about {}."))
        return _Request(text=ask.format(query), arguments={"query": query}, result=f"found {found}", reply=f"I found {found}.")
    if name in ("add", "multiply"):
        total = str(number + other if name == "add" else number * other)
        ask = {"add": "Use the tool to add {} and {}.", "multiply": "Use the tool to multiply {} by {}."}[name]
        return _Request(text=ask.format(number, other), arguments={"a": number, "b": other}, result=total, reply=f"The result is {total}.")
    if name == "send_message":
        person, text = rng.choice(FIRST_NAMES), " ".join(word(rng) for _ in range(rng.randint(1, 5)))
        ask = rng.choice(('Send "{1}" to {0}.', "Tell {0}: {1}", 'Send a message to {0} saying "{1}".'))
        return _Request(text=ask.format(person, text), arguments={"to": person, "text": text}, result="sent",
                        reply=f"I sent the message to {person}.")  # fmt: skip
    if name == "read_file":
        path, content = f"/{word(rng)}/{word(rng)}.{rng.choice(('txt', 'py', 'md'))}", f"{word(rng)} {word(rng)}"
        return _Request(text=rng.choice(("Read the file {}.", "Show me {}.", "Open {}.")).format(path), arguments={"path": path},
                        result=content, reply=f"The file says: {content}")  # fmt: skip
    if name == "set_timer":
        return _Request(text=rng.choice(("Set a timer for {} minutes.", "Start a {} minute timer.")).format(other),
                        arguments={"minutes": other}, result="started", reply=f"The timer runs for {other} minutes.")  # fmt: skip
    if name == "get_order":
        order, state = code(rng), rng.choice(("shipped", "delivered", "waiting", "cancelled"))
        return _Request(text=rng.choice(("Where is order {}?", "Look up order {}.", "What is the state of order {}?")).format(order),
                        arguments={"order_id": order}, result=state, reply=f"Order {order} is {state}.")  # fmt: skip
    if name == "set_light":
        room, on = rng.choice(("kitchen", "bedroom", "office", "hall", "garden", "bathroom")), rng.random() < 0.5
        state = "on" if on else "off"
        return _Request(text=rng.choice(("Turn {1} the light in the {0}.", "Switch {1} the {0} light.")).format(room, state),
                        arguments={"room": room, "on": on}, result="done", reply=f"The {room} light is {state}.")  # fmt: skip
    if name == "translate":
        text, language, out = word(rng), rng.choice(("French", "German", "Spanish", "Italian")), word(rng)
        return _Request(text=f"Translate {text} to {language}.", arguments={"text": text, "language": language}, result=out,
                        reply=f"{text} in {language} is {out}.")  # fmt: skip
    symbol = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(3, 4)))
    return _Request(text=rng.choice(("What is the price of {} stock?", "Price of {}?", "How much is {} stock?")).format(symbol),
                    arguments={"symbol": symbol}, result=str(number), reply=f"{symbol} is at {number}.")  # fmt: skip


def _schema(name: str, rng: random.Random) -> dict[str, object]:
    description, parameters = _SPECS[name]
    properties: dict[str, object] = {}
    for key, kind in parameters.items():
        properties[key] = {"type": kind} if rng.random() < 0.7 else {"type": kind, "description": f"The {key.replace('_', ' ')}."}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"name": name, "description": description, "parameters": schema}


def _renamed(rng: random.Random, schema: dict[str, object], arguments: dict[str, object]) -> tuple[str, dict[str, object], dict[str, object]]:
    """The same tool under an invented name, so that names must be read, not remembered."""
    name = f"{word(rng)}_{word(rng)}"
    return name, schema | {"name": name}, arguments


def tool(rng: random.Random) -> tuple[tuple[Turn, ...], tuple[dict[str, object], ...]]:
    """One to four tools, a request for one of them, and half of the time its result and the reply to it."""
    names = rng.sample(sorted(_SPECS), rng.randint(1, 4))
    chosen = rng.choice(names)
    request = _request(rng, chosen)
    schemas = [_schema(name, rng) for name in names]
    called, arguments = chosen, request.arguments
    if rng.random() < 0.2:
        index = names.index(chosen)
        called, schemas[index], arguments = _renamed(rng, schemas[index], arguments)
    turns = [
        Turn(user=request.text, answer="", calls=(Call(name=called, arguments=arguments),), reasoning=f"I call {called}."),
    ]
    if rng.random() < 0.4:
        result = request.result if rng.random() < 0.6 else json.dumps({"result": request.result})
        turns.append(Turn(user=result, answer=request.reply, reasoning="The tool has answered.", is_tool_result=True))
    return tuple(turns), tuple(schemas)
