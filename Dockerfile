# A server image: everything as locked, no compiler, no root.
FROM python:3.13-slim AS build
WORKDIR /src
COPY requirements/serve.txt requirements/
RUN python -m venv /opt/decideonce && /opt/decideonce/bin/pip install --no-cache-dir --require-hashes -r requirements/serve.txt
COPY pyproject.toml README.md ./
COPY client client
COPY server server
RUN /opt/decideonce/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir dist ./client .
RUN /opt/decideonce/bin/pip install --no-cache-dir --no-deps dist/*.whl

FROM python:3.13-slim
COPY --from=build /opt/decideonce /opt/decideonce
ENV PATH=/opt/decideonce/bin:$PATH DECIDEONCE_LISTEN=0.0.0.0:50051 DECIDEONCE_DATA_DIR=/var/lib/decideonce
RUN useradd --system --home-dir /var/lib/decideonce --create-home decideonce && decideonce --version
USER decideonce
# Beyond loopback it serves with TLS (DECIDEONCE_TLS_CERTIFICATE, DECIDEONCE_TLS_KEY), or without where
# DECIDEONCE_ALLOW_PLAINTEXT=1 says so. With TLS the health check needs DECIDEONCE_TLS_CA and a DECIDEONCE_SERVER that
# the certificate names.
EXPOSE 50051
HEALTHCHECK --interval=10s --timeout=3s CMD ["decideonce", "health"]
ENTRYPOINT ["decideonce"]
CMD ["serve"]
