"""Every error that this program names.

NodeError                     base: what failed, why probably, what to do next
├── ConfigError               a setting, a recipe or a scenario is wrong
├── IdentityError             a key file is missing, unreadable, or readable by others
├── DataDirError              a data directory is unwritable, in use, or of another version
├── PortError                 an address cannot be listened on
├── BootstrapError            no bootstrap peer can be used
├── RelayError                no relay could do what was asked
│   └── RefusedError          a relay refused a request and said why
├── ComputeError              the compute process reported a failure
│   └── ComputeCrashed        the compute process died (out of memory, killed)
├── ModelError                a model, tokenizer or checkpoint cannot be used
├── TrainingError             the policy has diverged: training on would only make it worse
├── EnvironmentUnknown        an environment is missing or has another digest
├── AuditError                an audit could not be made: nothing is said about the run
├── SandboxError              programs cannot be isolated on this machine
│   └── BoxError              one box of the sandbox did not start, or broke
└── ProtocolError             bytes from outside break the protocol
    ├── MalformedError        they do not decode, are too large, or break a bound
    ├── SignatureError        the signature does not hold
    ├── WrongAuthorError      the signature holds, but this author may not say that
    ├── WrongRunError         a record of another run
    ├── VersionError          another protocol version
    ├── ClockError            a signed time is in the future or past its end
    ├── StaleRecordError      an older sequence number than one already seen
    ├── ChecksumError         bytes do not have the hash that was signed for them
    └── LedgerError           an entry that the ledger's rules refuse
"""

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class NodeError(Exception):
    """Base of every error a person may see. `hint` is the next step, a sentence or a command.

    `exit_code` is what the command line ends with: 1 failed, 2 usage, 3 newer protocol needed.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  next: {self.hint}" if self.hint else self.message


class ConfigError(NodeError):
    """Raised when a setting, a recipe or a scenario is unknown, missing or out of bounds."""

    exit_code = 2


class IdentityError(NodeError):
    """Raised when a key file is missing, damaged, or readable by other users."""


class DataDirError(NodeError):
    """Raised when a data directory cannot be written, is in use by another node, or is of another version."""


class PortError(NodeError):
    """Raised when an address cannot be listened on, mostly because another program has it."""


class BootstrapError(NodeError):
    """Raised when a bootstrap address cannot be parsed, or answers with another peer id."""


class RelayError(NodeError):
    """Raised when no relay could do what was asked."""


class RefusedError(RelayError):
    """Raised when a relay refused a request; `code` is its machine-readable reason.

    `retry_after_s` says for how long the same request will be refused again; 0 where that is not known. `evidence` is
    what a third party signed and the refusal rests on, for whoever is refused to check; empty where there is none.
    """

    def __init__(
        self, message: str, *, code: str, hint: str = "", retry_after_s: float = 0.0, evidence: bytes = b""
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.retry_after_s = retry_after_s
        self.evidence = evidence


class ComputeError(NodeError):
    """Raised when a call into the compute process failed there; the process lives on."""


class ComputeCrashed(ComputeError):
    """Raised when the compute process died during a call."""


class ModelError(NodeError):
    """Raised when a model directory, a tokenizer or a checkpoint cannot be used."""


class TrainingError(NodeError):
    """Raised when training must stop: too many optimiser steps in a row had no finite loss or gradient."""


class EnvironmentUnknown(NodeError):
    """Raised when an environment is not installed or has another digest than the manifest's."""


class AuditError(NodeError):
    """Raised when an audit could not be made, whatever it would have found; 1 is for breaches."""

    exit_code = 2


class SandboxError(NodeError):
    """Raised when programs that nobody trusts cannot be isolated on this machine, so none is run."""


class BoxError(SandboxError):
    """Raised when one box did not start in time or broke; that says nothing about the program in it."""


class ProtocolError(NodeError):
    """Raised when bytes from outside break the protocol. Never raised for a local fault."""


class MalformedError(ProtocolError):
    """Raised when bytes do not decode, are too large, or break a bound."""


class SignatureError(ProtocolError):
    """Raised when a signature does not hold."""


class WrongAuthorError(ProtocolError):
    """Raised when a signature holds but its author has no right to say what it says."""


class WrongRunError(ProtocolError):
    """Raised when a record belongs to another run."""


class VersionError(ProtocolError):
    """Raised when a record speaks another protocol version; `author` is whose signature on it holds, if one does."""

    exit_code = 3

    def __init__(self, message: str, *, author: object = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.author = author


class ClockError(ProtocolError):
    """Raised when a signed time lies in the future, or its validity has ended."""


class StaleRecordError(ProtocolError):
    """Raised when a record has an older sequence number than one already seen."""


class ChecksumError(ProtocolError):
    """Raised when bytes do not have the hash that was signed for them."""


class LedgerError(ProtocolError):
    """Raised when an entry breaks a rule of the ledger; `rule` names it."""

    def __init__(self, message: str, *, rule: str) -> None:
        super().__init__(message)
        self.rule = rule


def innermost(error: BaseException) -> BaseException:
    """The first error in a nursery's group, which itself says only how many there are; an error alone as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def first_of(group: BaseExceptionGroup[BaseException], kind: type[E]) -> E | None:
    """The first error of a nursery's group; None unless all that went wrong is of this kind."""
    found, rest = group.split(kind)
    first = innermost(found) if found is not None and rest is None else None
    return first if isinstance(first, kind) else None


def named_error(group: BaseExceptionGroup[BaseException]) -> NodeError | None:
    """The first error of a nursery's group; None unless all that went wrong is errors of this tree."""
    return first_of(group, NodeError)
