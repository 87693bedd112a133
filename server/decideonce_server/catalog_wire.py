"""A catalog's source as it travels: to ApplyCatalogRequest and back."""

from datetime import UTC, timedelta

from decideonce.v1 import catalog_pb2 as wire
from decideonce.v1 import decision_service_pb2
from decideonce_server import values
from decideonce_server.catalog import (
    CatalogSource,
    Execution,
    OperationContract,
    PolicyExample,
    PolicySource,
    operation_contract,
)
from decideonce_server.errors import InvalidCatalog, Violation
from decideonce_server.requests import duration_of

EXECUTIONS = {
    Execution.INLINE: decision_service_pb2.EXECUTION_INLINE,
    Execution.BACKGROUND: decision_service_pb2.EXECUTION_BACKGROUND,
}
DURATIONS = ("default_wait", "max_wait", "lease", "time_budget", "retention", "tombstone_retention")


def request_of(source: CatalogSource, *, dry_run: bool) -> wire.ApplyCatalogRequest:
    """Write a source as a request."""
    return wire.ApplyCatalogRequest(
        policies=[_policy_definition(policy) for policy in source.policies],
        operations=[_operation_definition(contract) for contract in source.operations],
        dry_run=dry_run,
    )


def _policy_definition(policy: PolicySource) -> wire.PolicyDefinition:
    definition = wire.PolicyDefinition(
        policy_id=policy.policy_id,
        examples=[_policy_example(example) for example in policy.examples],
    )
    if policy.engine == "jdm":
        definition.jdm = policy.text
    else:
        definition.entry_point = policy.text
    return definition


def _policy_example(example: PolicyExample) -> wire.PolicyExample:
    message = wire.PolicyExample(
        name=example.name,
        facts=values.to_struct(example.facts),
        outcome=example.outcome,
        reasons=example.reasons,
        outputs=None if example.outputs is None else values.to_struct(example.outputs),
    )
    if example.time is not None:
        message.time.FromDatetime(example.time)
    return message


def _operation_definition(contract: OperationContract) -> wire.OperationDefinition:
    message = wire.OperationDefinition(
        operation=contract.operation,
        policy_id=contract.policy_id or "",
        policy_version=contract.policy_version,
        execution=EXECUTIONS[contract.execution],
        max_attempts=contract.max_attempts,
        facts_schema=contract.facts_schema,
        topic=contract.topic,
    )
    for name in DURATIONS:
        duration: timedelta | None = getattr(contract, name)
        if duration is not None:
            getattr(message, name).FromTimedelta(duration)
    return message


def source_of(request: wire.ApplyCatalogRequest) -> CatalogSource:
    """Read a source from a request.

    Raises:
        InvalidCatalog, InvalidRequest: a field is malformed.
    """
    return CatalogSource(
        policies=tuple(_policy_source(policy) for policy in request.policies),
        operations=tuple(_contract(operation) for operation in request.operations),
    )


def _policy_source(policy: wire.PolicyDefinition) -> PolicySource:
    kind = policy.WhichOneof("definition")
    if kind is None:
        raise InvalidCatalog([Violation(f"policies/{policy.policy_id}", "must have jdm or entry_point")])
    return PolicySource(
        policy_id=policy.policy_id,
        engine="jdm" if kind == "jdm" else "python",
        text=policy.jdm if kind == "jdm" else policy.entry_point,
        examples=tuple(_example(policy.policy_id, example) for example in policy.examples),
    )


def _example(policy_id: str, example: wire.PolicyExample) -> PolicyExample:
    field = f"policies/{policy_id}/examples/{example.name}"
    try:
        return PolicyExample(
            name=example.name,
            facts=values.from_struct(example.facts),
            outcome=example.outcome,
            reasons=tuple(example.reasons),
            outputs=values.from_struct(example.outputs) if example.HasField("outputs") else None,
            time=example.time.ToDatetime(UTC) if example.HasField("time") else None,
        )
    except values.ValueFault as fault:
        raise InvalidCatalog([Violation(field + fault.path, fault.rule)]) from None
    except ValueError:
        raise InvalidCatalog([Violation(f"{field}/time", "must be a timestamp")]) from None


def _contract(operation: wire.OperationDefinition) -> OperationContract:
    given = {
        field.name: duration_of(duration, f"operations/{operation.operation}/{field.name}")
        for field, duration in operation.ListFields()
        if field.name in DURATIONS
    }
    background = operation.execution == decision_service_pb2.EXECUTION_BACKGROUND
    return operation_contract(
        operation=operation.operation,
        policy_id=operation.policy_id or None,
        policy_version=operation.policy_version if operation.HasField("policy_version") else None,
        execution=Execution.BACKGROUND if background else Execution.INLINE,
        max_attempts=operation.max_attempts or None,
        facts_schema=operation.facts_schema,
        topic=operation.topic,
        **given,
    )
