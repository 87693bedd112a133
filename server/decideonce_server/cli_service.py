"""What every command has that calls a service: which one it is, as whom, and how its errors are said."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Any

import click
import grpc
from google.rpc import error_details_pb2, status_pb2

from decideonce.v1 import catalog_pb2
from decideonce.v1.catalog_pb2_grpc import CatalogServiceStub
from decideonce.v1.decision_service_pb2_grpc import DecisionServiceStub
from decideonce_server import console
from decideonce_server.errors import Violation
from decideonce_server.options import json_option, setting
from decideonce_server.settings import DEV_TOKEN_FILE

# For the answer's way, on top of what the caller wants to wait.
CALL_TIME_S = 10.0


@dataclass(frozen=True, slots=True)
class Service:
    """A service to call, and as whom."""

    channel: grpc.Channel
    metadata: tuple[tuple[str, str], ...]

    @property
    def decisions(self) -> DecisionServiceStub:
        """The stub of DecisionService."""
        return DecisionServiceStub(self.channel)

    @property
    def catalog(self) -> CatalogServiceStub:
        """The stub of CatalogService."""
        return CatalogServiceStub(self.channel)


def calls_service(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say which service to call, and the service; errors are said shortly."""

    @setting("--server", "The service to call.", default="127.0.0.1:50051")
    @setting("--token", "The caller's token. Without it: the one in DATA_DIR/dev-token, if there is one.")
    @setting("--data-dir", "Where a service in embedded mode keeps its data.", default=".decideonce")
    @setting("--tls-ca", "PEM certificates to trust. With it: TLS.", type=click.Path(path_type=Path, exists=True))
    @json_option
    @wraps(command)
    def wrapped(*, server: str, token: str | None, data_dir: str, tls_ca: Path | None, **options: Any) -> None:
        if token is None:
            token = _dev_token(Path(data_dir) / DEV_TOKEN_FILE)
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        if tls_ca is None:
            channel = grpc.insecure_channel(server)
        else:
            channel = grpc.secure_channel(server, grpc.ssl_channel_credentials(tls_ca.read_bytes()))
        service = Service(channel, metadata)
        with channel, _said_shortly(service, server, as_json=options["as_json"]):
            command(service, **options)

    return wrapped


def _dev_token(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        console.fail(f"can't read {path}: {error.strerror}", hint="give --token or DECIDEONCE_TOKEN")


@contextmanager
def _said_shortly(service: Service, server: str, *, as_json: bool) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        info, bad_request = _details(error)
        reason = info.reason or error.code().name
        # Without an ErrorInfo it is gRPC that speaks, not the service.
        message = error.details() if info.reason else f"no answer from {server}"
        violations = [Violation(v.field, v.description) for v in bad_request.field_violations]
        if as_json:
            said = {"reason": reason, "message": message, "metadata": dict(info.metadata)}
            console.print_json({"error": said | {"fields": [console.fields_of(v) for v in violations]}})
            raise SystemExit(1) from None
        metadata = "".join(f" ({name} {value})" for name, value in sorted(info.metadata.items()))
        console.fail(f"{reason}: {message}{metadata}", violations, _hint(error, info, service))


def _details(error: grpc.RpcError) -> tuple[error_details_pb2.ErrorInfo, error_details_pb2.BadRequest]:
    trailers: Any = error.trailing_metadata() or ()
    status = status_pb2.Status.FromString(dict(trailers).get("grpc-status-details-bin", b""))
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        detail.Unpack(info) or detail.Unpack(bad_request)
    return info, bad_request


def _hint(error: grpc.RpcError, info: error_details_pb2.ErrorInfo, service: Service) -> str:
    if info.reason == "UNAUTHENTICATED":
        return (
            "this token is not valid there"
            if service.metadata
            else "no token was sent: give --token or DECIDEONCE_TOKEN"
        )
    if info.reason == "OPERATION_NOT_FOUND":
        similar = get_close_matches(info.metadata["operation"], _operations(service), n=1)
        return f"did you mean {similar[0]}?" if similar else ""
    if not info.reason and error.code() is grpc.StatusCode.UNAVAILABLE:
        cause = (error.details() or "").rpartition(": ")[2]
        return f"{cause}; is `decideonce serve` running there? --server names another, --tls-ca is for TLS"
    return ""


def _operations(service: Service) -> list[str]:
    """Give the names of all operations, or of none where the caller is not one who may read the catalog."""
    request = catalog_pb2.GetCatalogRequest()
    with suppress(grpc.RpcError):
        catalog = service.catalog.GetCatalog(request, metadata=service.metadata, timeout=CALL_TIME_S)
        return [operation.operation for operation in catalog.operations]
    return []
