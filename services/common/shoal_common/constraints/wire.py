"""Between `shoal.common.v1.Constraint` and a kind with its text."""

from __future__ import annotations

from shoal.common.v1 import sampling_pb2

from shoal_common.constraints.kinds import ConstraintKind, OutputConstraint, invalid


def kind_and_text(message: sampling_pb2.Constraint, field: str) -> tuple[ConstraintKind, str]:
    """What a message asks for, unchecked. Raises ConstraintInvalid naming `field` unless exactly one kind is set."""
    name = message.WhichOneof("kind")
    if name is None:
        raise invalid(field, f"one of {', '.join(kind.value for kind in ConstraintKind)} is required")
    kind = ConstraintKind(name)
    if kind is ConstraintKind.JSON_OBJECT:
        if not message.json_object:
            raise invalid(f"{field}.{name}", "must be true")
        return kind, ""
    text: str = getattr(message, name)
    return kind, text


def constraint_message(constraint: OutputConstraint) -> sampling_pb2.Constraint:
    """The message of a checked constraint."""
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return sampling_pb2.Constraint(json_object=True)
    message = sampling_pb2.Constraint()
    setattr(message, constraint.kind.value, constraint.text)
    return message
