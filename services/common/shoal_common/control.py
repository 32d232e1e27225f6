"""Requests to one instance over the bus: drain, resume, log level, profile. Each is answered."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping

from shoal_common import subjects
from shoal_common.bus import Bus, Message
from shoal_common.errors import Internal, InvalidArgument, MeshError, OutOfCapacity, Unimplemented, class_for

logger = logging.getLogger(__name__)

_MAX_RUNNING = 8

Command = Callable[[Mapping[str, str]], Awaitable[Mapping[str, str]]]
"""Takes the arguments, returns what to tell the asker. May raise MeshError."""


class ControlServer:
    """Carries out commands sent to one instance; unknown ones are refused as UNIMPLEMENTED.

    At most eight run at a time, so that a drain need not wait for a profile; more are refused as RESOURCE_EXHAUSTED.
    """

    def __init__(self, bus: Bus, *, mesh: str, instance_id: str, commands: Mapping[str, Command]) -> None:
        self._bus = bus
        self._subject = subjects.control(mesh, instance_id)
        self._commands = dict(commands)
        self._running: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen from now on."""
        await self._bus.subscribe(self._subject, self._on_request)

    async def _on_request(self, message: Message) -> None:
        if len(self._running) >= _MAX_RUNNING:
            await message.respond(_refusal(OutOfCapacity(f"{_MAX_RUNNING} commands run already", limit=_MAX_RUNNING)))
            return
        task = asyncio.get_running_loop().create_task(self._answer(message))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _answer(self, message: Message) -> None:
        try:
            answer = json.dumps({"ok": dict(await self._carry_out(message.payload))}).encode()
        except MeshError as error:
            answer = _refusal(error)
        except Exception as error:
            logger.error("a control command failed", exc_info=error)
            answer = _refusal(Internal("see the instance's log"))
        await message.respond(answer)

    async def _carry_out(self, payload: bytes) -> Mapping[str, str]:
        try:
            request = json.loads(payload)
            name = str(request["command"])
            arguments = {str(key): str(value) for key, value in request.get("arguments", {}).items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgument(f"not a control request: {error}") from error
        if name not in self._commands:
            known = ", ".join(sorted(self._commands))
            raise Unimplemented(f"unknown command {name!r}; known are {known}", command=name)
        logger.info("control command", extra={"command": name, "arguments": arguments})
        return await self._commands[name](arguments)


def _refusal(error: MeshError) -> bytes:
    return json.dumps({"error": {"code": error.code, "reason": error.reason, "message": error.message}}).encode()


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
