"""What callers asked and were told, and which faults there were: all that a check has, besides the database."""

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

Key = tuple[str, str, str]


class Result(StrEnum):
    """What a call ended with."""

    PROCESSING = "PROCESSING"
    SUCCEEDED = "SUCCEEDED"
    FAILED_RETRYABLE = "FAILED_RETRYABLE"
    FAILED_FINAL = "FAILED_FINAL"
    EXPIRED = "EXPIRED"
    # The call has an error or no answer at all.
    ERROR = "ERROR"


# Where a fault is that is of no instance.
BROKER = "broker"

FINAL = (Result.SUCCEEDED, Result.FAILED_FINAL)


@dataclass
class Call:
    """One call. Times are the driver's monotonic clock in seconds; `facts` numbers the facts that were sent."""

    tenant: str
    operation: str
    operation_key: str
    method: str
    facts: int
    instance: str
    began: float
    ended: float = 0.0
    result: Result = Result.ERROR
    # A gRPC code, or code and reason: "ALREADY_EXISTS OPERATION_KEY_REUSED".
    error: str = ""
    replayed: bool = False
    decision: str = ""
    provenance: str = ""
    provenance_tenant: str = ""
    outcome: str = ""
    policy_version: int = 0
    attempt: int = 0
    failure: str = ""
    # PROCESSING because another call was just writing the key: neither compared with what it writes, nor recorded yet.
    is_contended: bool = False
    # The number that the facts had, and the one that the decision was made on.
    sent: int = 0
    told: int = 0

    @property
    def is_acknowledged(self) -> bool:
        """Whether the answer says that this very request is recorded."""
        return self.result is not Result.ERROR and not self.is_contended

    @property
    def key(self) -> Key:
        """What the call is about."""
        return self.tenant, self.operation, self.operation_key

    def __str__(self) -> str:
        said = self.outcome or self.failure
        told = self.error or f"{self.result}{' replayed' * self.replayed} {said} attempt {self.attempt}"
        what = f"{self.method} facts {self.facts}" if self.method == "Decide" else self.method
        return f"{self.began:8.3f} to {self.ended:8.3f}  {self.instance}  {what}: {told}"


@dataclass
class Fault:
    """One fault, from when it was injected until it was healed."""

    kind: str
    where: str
    began: float
    ended: float = 0.0

    def __str__(self) -> str:
        return f"{self.began:8.3f} to {self.ended:8.3f}  {self.where}  FAULT {self.kind}"


@dataclass
class History:
    """Everything in the order in which it ended. `epoch` is its time 0 as the machine's clock had it.

    `deliveries` are the times at which a consumer had applied what came.
    """

    calls: list[Call] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    deliveries: list[float] = field(default_factory=list)
    epoch: float = 0.0

    def write(self, path: Path) -> None:
        """Keep a history, as JSON lines."""
        with path.open("w") as file:
            for entry in (*self.faults, *self.calls):
                file.write(json.dumps(asdict(entry)) + "\n")
