"""The frames of OpenEnv's WebSocket protocol: what a client asked, and what it is answered."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from openenv.core.env_server.serialization import deserialize_action, serialize_observation
from openenv.core.env_server.types import (
    WSErrorCode,
    WSErrorResponse,
    WSObservationResponse,
    WSResetMessage,
    WSStateMessage,
    WSStateResponse,
    WSStepMessage,
)
from pydantic import ValidationError

from composer_replication.errors import ComposerError, UsageError
from composer_replication.rollouts.environment.openenv_types import (
    AttemptObservation,
    AttemptState,
    ToolAction,
)

_MAX_NAMED = 3
_HOW = 'send {"type": "reset" or "step" or "state" or "close", "data": {...}}; /schema has the actions.'


@dataclass(frozen=True, slots=True)
class ResetAsked:
    """A new attempt is asked for, with these arguments."""

    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StepAsked:
    """A call is to be made."""

    action: ToolAction


@dataclass(frozen=True, slots=True)
class StateAsked:
    """How far the attempt is, is asked."""


@dataclass(frozen=True, slots=True)
class CloseAsked:
    """The session is over."""


@dataclass(frozen=True, slots=True)
class NotUnderstood:
    """What was wrong with a frame: the kind in OpenEnv's words, and our sentence."""

    kind: str
    error: ComposerError


Asked = ResetAsked | StepAsked | StateAsked | CloseAsked | NotUnderstood


def read_frame(frame: str | bytes) -> Asked:
    """What a frame asks; whatever is wrong with it is an answer too, never an error."""
    try:
        message = json.loads(frame)
    except (ValueError, RecursionError):
        return _not_understood(WSErrorCode.INVALID_JSON, "it is no JSON text")
    kind = message.get("type") if isinstance(message, dict) else None
    try:
        match kind:
            case "reset":
                return ResetAsked(WSResetMessage(**message).data)
            case "step":
                return StepAsked(deserialize_action(WSStepMessage(**message).data, ToolAction))
            case "state":
                WSStateMessage(**message)
                return StateAsked()
            case "close":
                return CloseAsked()
    except ValidationError as error:
        return _not_understood(WSErrorCode.VALIDATION_ERROR, _faults(error))
    except (TypeError, RecursionError):  # keys that are no words, or nesting without end
        return _not_understood(WSErrorCode.VALIDATION_ERROR, "its parts are not what this type has")
    return _not_understood(WSErrorCode.UNKNOWN_TYPE, "its type is none of reset, step, state, close")


def observation_frame(observation: AttemptObservation) -> str:
    """The answer to a reset or a step."""
    return _text(WSObservationResponse(data=serialize_observation(observation)))


def state_frame(state: AttemptState) -> str:
    """The answer to a question for the state."""
    return _text(WSStateResponse(data=state.model_dump()))


def error_frame(error: ComposerError, kind: str = WSErrorCode.EXECUTION_ERROR) -> str:
    """A refusal: code, sentence and next step. Places are left out: they are paths of the server's machine."""
    fix = f" Next: {error.fix}" if error.fix else ""
    return _text(WSErrorResponse(data={"message": f"{error.code}: {error.message}{fix}", "code": kind}))


def _text(response: WSObservationResponse | WSStateResponse | WSErrorResponse) -> str:
    """Our own text: pydantic's refuses halves of surrogate pairs, of which a client's words may be made."""
    return json.dumps(response.model_dump(mode="python"))


def _not_understood(kind: str, what: str) -> NotUnderstood:
    return NotUnderstood(
        kind, UsageError("CR0854", f"this message is not understood: {what}.", where="/ws", fix=_HOW)
    )


def _faults(error: ValidationError) -> str:
    found = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
    more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return f"{'; '.join(text[:200] for text in found[:_MAX_NAMED])}{more}"
