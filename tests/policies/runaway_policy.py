"""A policy that matches a pattern which backtracks for ever."""

import re

PATTERN = re.compile(r"(a+)+$")


def match(facts, decision):
    return {"outcome": "MATCHED" if PATTERN.match(facts["text"]) else "DIFFERENT"}
