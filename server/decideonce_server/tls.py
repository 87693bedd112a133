"""The certificates that the service serves with, read anew when their files change: no restart is needed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from decideonce_server.settings import InvalidSetting

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A PEM certificate chain and its key; with `client_ca`, callers have to show a certificate of that authority."""

    certificate: Path
    key: Path
    client_ca: Path | None

    def _paths(self) -> list[Path]:
        return [self.certificate, self.key, *([self.client_ca] if self.client_ca else [])]

    def stamp(self) -> tuple[int, ...]:
        """Tell which content the files have, by their times.

        Raises:
            OSError: one isn't there.
        """
        return tuple(path.stat().st_mtime_ns for path in self._paths())

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Read the files.

        Raises:
            InvalidSetting: they can't be used together.
        """
        try:
            contents = [path.read_bytes() for path in self._paths()]
            certificate = x509.load_pem_x509_certificates(contents[0])[0]
            key = serialization.load_pem_private_key(contents[1], None)
            if len(contents) > 2:  # noqa: PLR2004  # with an authority
                x509.load_pem_x509_certificates(contents[2])
        except (OSError, ValueError, TypeError):
            raise InvalidSetting(
                "--tls-certificate, --tls-key and --tls-client-ca must be PEM files that can be read, the key without "
                "a passphrase",
            ) from None
        if certificate.public_key() != key.public_key():
            raise InvalidSetting("--tls-key must be the key of the first certificate in --tls-certificate")
        return grpc.ssl_server_certificate_configuration(
            [(contents[1], contents[0])],
            contents[2] if self.client_ca else None,
        )


class Reloading:
    """Gives the files' content to each handshake. What can't be used is not taken up: the old goes on."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamp = files.stamp()
        self.first = files.read()

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        """Give what is new since the last call; None where nothing is. Called by gRPC's own threads."""
        try:
            stamp = self._files.stamp()
            if stamp == self._stamp:
                return None
            configuration = self._files.read()
        except (OSError, InvalidSetting) as error:
            log.error("new certificates can't be used; the old ones go on", error=str(error))  # noqa: TRY400
            return None
        self._stamp = stamp
        log.info("certificates read anew")
        return configuration


def credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Make credentials that follow the files.

    Raises:
        InvalidSetting: the files can't be used now.
        OSError: one isn't there.
    """
    reloading = Reloading(files)
    return grpc.dynamic_ssl_server_credentials(
        reloading.first,
        # None says that nothing is new, whatever the type stub says.
        cast("Callable[[], grpc.ServerCertificateConfiguration]", reloading),
        require_client_authentication=files.client_ca is not None,
    )
