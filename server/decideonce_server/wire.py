"""gRPC as the interceptors see it: one small base for those that wrap unary calls, and the contract's methods.

grpc.aio gives an interceptor the method but not the request, so each wraps the handler that lies below it.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc
from google.protobuf import unknown_fields
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pb2 import MethodOptions
from google.protobuf.message import DecodeError, Message

from decideonce.v1 import catalog_pb2, decision_service_pb2
from decideonce_server.errors import InvalidRequest, UnknownField, Violation

SERVICES = (
    decision_service_pb2.DESCRIPTOR.services_by_name["DecisionService"],
    catalog_pb2.DESCRIPTOR.services_by_name["CatalogService"],
)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Proceed: TypeAlias = Callable[[Any, Context], Awaitable[Any]]
# grpc.RpcMethodHandler; its type stubs describe synchronous servers only.
Handler: TypeAlias = Any

# The call's request once it is parsed, for what lies above parsing.
current_request: ContextVar[Any] = ContextVar("current_request", default=None)


def method_path(method: MethodDescriptor) -> str:
    """Name a method as gRPC does: "/package.Service/Method"."""
    return f"/{method.containing_service.full_name}/{method.name}"


def methods() -> Iterator[MethodDescriptor]:
    """Give every method of the contract."""
    for service in SERVICES:
        yield from service.methods


def idempotent_methods() -> frozenset[str]:
    """Name the methods that the contract declares idempotent: each is protected by its operation key."""
    return frozenset(
        method_path(method) for method in methods() if method.GetOptions().idempotency_level == MethodOptions.IDEMPOTENT
    )


class UnaryInterceptor(grpc.aio.ServerInterceptor):
    """Base of an interceptor that sees a unary call's request and response.

    The wrapped handler of a method is made once: nothing below depends on the single call.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    async def intercept(self, method: str, request: Any, context: Context, proceed: Proceed) -> Any:  # noqa: ARG002
        """Handle a call; `proceed` hands it on to what lies below."""
        return await proceed(request, context)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the handler that lies below."""
        method = handler_call_details.method
        if method not in self._handlers:
            handler = await continuation(handler_call_details)
            if handler is None:
                # Not kept: anybody can make up names of methods.
                return None
            self._handlers[method] = self.wrap(method, handler)
        return self._handlers[method]

    def wrap(self, method: str, handler: Handler) -> Handler:
        """Wrap one handler. Streams pass: health and reflection have some, the contract has none."""
        if handler.unary_unary is None:
            return handler
        proceed = handler.unary_unary

        async def intercepted(request: Any, context: Context) -> Any:
            return await self.intercept(method, request, context, proceed)

        return grpc.unary_unary_rpc_method_handler(
            intercepted,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


class ParseInterceptor(UnaryInterceptor):
    """Reads requests and writes responses. Above it, a call has bytes, so a malformed one is counted like any other."""

    def wrap(self, method: str, handler: Handler) -> Handler:  # noqa: ARG002
        """Take over what gRPC would do with the handler's own functions."""
        if handler.unary_unary is None:
            return handler
        deserialize, serialize = handler.request_deserializer, handler.response_serializer
        proceed = handler.unary_unary

        async def parsed(data: bytes, context: Context) -> bytes:
            request = parse(deserialize, data)
            current_request.set(request)
            response = await proceed(request, context)
            return response if isinstance(response, bytes) else serialize(response)

        return grpc.unary_unary_rpc_method_handler(parsed)


def parse(deserialize: Callable[[bytes], Any], data: bytes) -> Any:
    """Read a request as it came, and refuse what the contract doesn't know.

    Raises:
        InvalidRequest: it is no message of its type.
        UnknownField: a field at any depth is not part of the contract. Its meaning could not be part of the request's
            identity, so it can't be let pass.
    """
    try:
        request = deserialize(data)
    except DecodeError:
        raise InvalidRequest([Violation("request", "must be a protobuf message of its type")]) from None
    if isinstance(request, Message):
        _refuse_unknown_fields(request)
    return request


def _refuse_unknown_fields(request: Message) -> None:
    known = type(request)()
    known.CopyFrom(request)
    known.DiscardUnknownFields()
    if known.ByteSize() != request.ByteSize():
        for path, number in _unknown_fields(request, ""):
            raise UnknownField(path, number)


def _unknown_fields(message: Message, path: str) -> Iterator[tuple[str, int]]:
    unknown = unknown_fields.UnknownFieldSet(message)
    for i in range(len(unknown)):
        yield f"{path}{unknown[i].field_number}", unknown[i].field_number
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is not None:
                for key in sorted(value):
                    yield from _unknown_fields(value[key], f"{path}{field.name}.{key}.")
        elif field.is_repeated:
            for i, item in enumerate(value):
                yield from _unknown_fields(item, f"{path}{field.name}[{i}].")
        else:
            yield from _unknown_fields(value, f"{path}{field.name}.")
