"""Client of decideonce, the service that makes a business decision exactly once.

For callers: `client` has the two clients, `journal` what lets a caller that crashed finish what it began, `testing` a
service for tests. For consumers of events: `events` reads them, `inbox` applies each once. `v1` has the stubs.

Nothing is imported here: a consumer needs no gRPC, and a caller no inbox.
"""
