"""Requests to one instance over the bus: drain, resume, log level, profile. Each is answered."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping

from shoal_common import subjects
from shoal_common.bus import Bus, Message
from shoal_common.errors import MeshError, class_for

logger = logging.getLogger(__name__)

Command = Callable[[Mapping[str, str]], Awaitable[Mapping[str, str]]]
"""Takes the arguments, returns what to tell the asker. May raise MeshError."""


class ControlServer:
    """Carries out commands sent to one instance; unknown ones are refused as UNIMPLEMENTED."""

    def __init__(self, bus: Bus, *, mesh: str, instance_id: str, commands: Mapping[str, Command]) -> None:
        self._bus = bus
        self._subject = subjects.control(mesh, instance_id)
        self._commands = dict(commands)

    async def start(self) -> None:
        """Listen from now on."""
        await self._bus.subscribe(self._subject, self._on_request)

    async def _on_request(self, message: Message) -> None:
        answer: dict[str, object]
        try:
            answer = {"ok": dict(await self._carry_out(message.payload))}
        except MeshError as error:
            answer = {"error": {"code": error.code, "reason": error.reason, "message": error.message}}
        except Exception as error:
            logger.error("a control command failed", exc_info=error)
            answer = {"error": {"code": "INTERNAL", "reason": "INTERNAL", "message": "see the instance's log"}}
        await message.respond(json.dumps(answer).encode())

    async def _carry_out(self, payload: bytes) -> Mapping[str, str]:
        try:
            request = json.loads(payload)
            name = str(request["command"])
            arguments = {str(key): str(value) for key, value in request.get("arguments", {}).items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise class_for("INVALID_ARGUMENT", "")(f"not a control request: {error}") from error
        if name not in self._commands:
            known = ", ".join(sorted(self._commands))
            raise class_for("UNIMPLEMENTED", "")(f"unknown command {name!r}; known are {known}", command=name)
        logger.info("control command", extra={"command": name, "arguments": arguments})
        return await self._commands[name](arguments)


async def send(
    bus: Bus,
    command: str,
    arguments: Mapping[str, str] | None = None,
    *,
    mesh: str,
    instance_id: str,
    timeout_s: float,
) -> dict[str, str]:
    """Have an instance carry out a command and return its answer. Raises the MeshError it answers, or the bus's."""
    payload = json.dumps({"command": command, "arguments": dict(arguments or {})}).encode()
    answer = json.loads(await bus.request(subjects.control(mesh, instance_id), payload, timeout_s=timeout_s))
    if "error" in answer:
        error = answer["error"]
        raise class_for(error["code"], error["reason"])(error["message"], reason=error["reason"])
    return {str(key): str(value) for key, value in answer["ok"].items()}
