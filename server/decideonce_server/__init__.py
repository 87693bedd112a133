"""The service that makes a business decision exactly once.

The way of a request, module by module:

    wire -> status -> telemetry -> auth -> idempotency -> servicer -> decide -> policy
            errors→   counts       who?    normalise,      map         |
            code                   tenant  fingerprint,                |
                                           reserve or replay           ledger.complete: decision + events, fenced
    publisher <- outbox <---------------------------------------------'

`app` puts them together.
"""
