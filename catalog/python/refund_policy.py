# ruff: noqa: INP001 (a team's own folder on the Python path, not a package)
"""Whether a refund may be paid out.

A refund never exceeds what is left of the payment, comes within the window of its payment method, and goes to a person
where the amount, the customer's history or a mark on the file asks for one.
"""

from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

_WINDOWS = {"card": timedelta(days=120), "wallet": timedelta(days=180), "bank-transfer": timedelta(days=390)}
_LIMITS = {"clerk": Decimal(250), "supervisor": Decimal(2500), "system": Decimal(250)}
_REFUNDS_IN_90_DAYS_MAX = 4
_CENT = Decimal("0.01")


def decide(facts: dict[str, Any], decision: dict[str, Any]) -> dict[str, Any]:
    """Give the outcome: authorized, review or declined."""
    payment, refund = facts["payment"], facts["refund"]
    amount = Decimal(refund["amount"])
    remaining = Decimal(payment["amount"]) - Decimal(payment["refunded"])

    refusals = _refusals(payment, refund, remaining, datetime.fromisoformat(decision["time"]))
    if refusals:
        return {"outcome": "declined", "reasons": refusals}
    doubts = _doubts(facts, amount)
    if doubts:
        payload = {"amount": _text(amount), "currency": refund["currency"], "reasons": doubts}
        return {
            "outcome": "review",
            "reasons": doubts,
            "effects": [{"type": "payment.refund-review-requested", "payload": payload}],
        }
    return {
        "outcome": "authorized",
        "amount": _text(amount),
        "remaining": _text(remaining - amount),
        "effects": [
            {
                "type": "payment.refund-authorized",
                "payload": {"amount": _text(amount), "currency": refund["currency"], "reason": refund["reason"]},
            }
        ],
    }


def _refusals(payment: dict[str, Any], refund: dict[str, Any], remaining: Decimal, time: datetime) -> list[str]:
    amount = Decimal(refund["amount"])
    age = time - datetime.fromisoformat(payment["captured_at"])
    rules = {
        "currency-mismatch": refund["currency"] != payment["currency"],
        "amount-not-positive": amount <= 0,
        "over-remaining": amount > remaining,
        "disputed": payment["is_disputed"],
        "window-closed": age > _WINDOWS[payment["method"]],
    }
    return [reason for reason, applies in rules.items() if applies]


def _doubts(facts: dict[str, Any], amount: Decimal) -> list[str]:
    customer = facts["customer"]
    rules = {
        "over-limit": amount > _LIMITS[facts["agent_role"]],
        "many-refunds": customer["refunds_90d"] > _REFUNDS_IN_90_DAYS_MAX and "vip" not in customer["flags"],
        "refund-abuse": "refund-abuse" in customer["flags"],
    }
    return [reason for reason, applies in rules.items() if applies]


def _text(amount: Decimal) -> str:
    return str(amount.quantize(_CENT) if amount == amount.quantize(_CENT) else amount)
