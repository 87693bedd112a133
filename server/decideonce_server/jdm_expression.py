"""The text of the expressions in JDM documents: what is refused in it, and how it is kept from reading the clock.

zen gives an expression's meaning; this module only reads its words. Functions are an allow-list, so that one which a
later zen adds is refused until somebody has looked at it. What zen 2.1 has beyond the list:

- `rand` gives a random number;
- `d` reads the clock without an argument and for the name of a time zone (`d('UTC')`, so also `d(facts.country)` where
  that is "Japan"), otherwise it reads the host's time zone, and the methods of its dates (`isToday`,
  `isBefore('UTC')`) do the same;
- `keys` and `values` give an object's members in an order that JSON doesn't define.

The functions for dates that remain (`date`, `time`, `year`, …) count in UTC and read the clock for exactly one text,
"now". A literal 'now' is refused; any other argument is guarded at evaluation, see `guarded`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

import zen

from decideonce_server.values import NUMBER_MAX

DATE_FUNCTIONS = frozenset(
    (  # noqa: SIM905 (forty words, one a line, would hide the rest of the module)
        "date time year dayOfWeek dayOfMonth dayOfYear weekOfYear monthOfYear monthString dateString weekdayString"
        " startOf endOf"
    ).split()
)
FUNCTIONS = DATE_FUNCTIONS.union(
    (  # noqa: SIM905 (see above)
        "len contains flatten merge mergeDeep upper lower trim startsWith endsWith matches extract fuzzyMatch split"
        " abs sum avg min max median mode floor ceil round trunc isNumeric string number bool type duration"
        " all none some one filter map flatMap count"
    ).split()
)
DIGITS_MAX = 28
# zen reads an expression recursively: 20,000 lists in one another overflow its stack.
LENGTH_MAX = 16_384

_WHY_REFUSED = {
    "d": "must not call d(), which reads the clock or the host's time zone; use date() with a text",
    "rand": "must not call rand(), which is random",
    "keys": "must not call keys(), whose order is not defined",
    "values": "must not call values(), whose order is not defined",
}
_CLOCK_WORD = "now"
_OPERATOR_WORDS = frozenset({"and", "or", "not", "in", "as"})
_CLOSED_WORDS = _OPERATOR_WORDS | {"true", "false", "null", "$", "#"}
_SAMPLES: tuple[object, ...] = (1, "a", True, None, [1], {})

_CODE = re.compile(
    r"(?P<space>[ \t\n]+)"
    r"|(?P<text>'[^']*'|\"[^\"]*\")"
    r"|(?P<number>[0-9][0-9_]*(?:\.(?!\.)[0-9_]*)?(?:e[+-]?[0-9]+)?)"
    r"|(?P<word>[A-Za-z_$#][A-Za-z0-9_$#]*)"
    r"|(?P<mark>.)",
    re.DOTALL,
)
_NUMBER = r"-?[0-9][0-9_]*(?:\.[0-9_]+)?"
_TEXT = r"(?:'[^']*'|\"[^\"]*\")"


def _list_of(literal: str) -> str:
    return rf"{literal}(?: *, *{literal})*"


# Cells that compare with literals of one kind, in every form for which zen has no error on a value of that kind.
_PLAIN_CELLS = {
    "number": re.compile(
        rf" *(?:(?:[<>]=?|[=!]=)? *{_NUMBER}|{_list_of(_NUMBER)}|(?:not +)?in *\[ *{_list_of(_NUMBER)} *\]"
        rf"|[\[(] *{_NUMBER} *\.\. *{_NUMBER} *[\])]) *"
    ),
    "text": re.compile(rf" *(?:[=!]= *{_TEXT}|{_list_of(_TEXT)}|(?:not +)?in *\[ *{_list_of(_TEXT)} *\]) *"),
    "boolean": re.compile(r" *(?:[=!]= *)?(?:true|false) *"),
}
_PATH = re.compile(r" *[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)* *")
_LITERAL = re.compile(rf" *(?:{_NUMBER}|{_TEXT}|true|false|null|\[ *{_list_of(_TEXT)} *\]) *")
_TEMPLATE = re.compile(r"(?P<text>(?:[^`$]|\$(?!\{))+)|(?P<mark>`|\$\{)")


class UnreadableExpression(Exception):
    """A text whose words can't be told apart with certainty; the exception's text says the rule it breaks."""


@dataclass(frozen=True, slots=True)
class Token:
    """A word of an expression: `kind` is word, number, text or mark; `start` and `end` are where it stands."""

    kind: str
    text: str
    start: int
    end: int


def tokens(text: str) -> list[Token]:
    """Split an expression into its words, those inside template texts too.

    Raises:
        UnreadableExpression: a text is not closed, or a template holds an object, whose end zen and this could see
            in different places.
    """
    found: list[Token] = []
    position, pattern, in_template = 0, _CODE, False
    while position < len(text):
        match = pattern.match(text, position)
        if match is None or (match.lastgroup == "mark" and match.group() in ("'", '"')):
            raise UnreadableExpression("must close every text that it opens")
        position = match.end()
        mark = match.group() if match.lastgroup == "mark" else ""
        if mark == "`":
            in_template = not in_template
            pattern = _TEMPLATE if in_template else _CODE
        elif mark == "${":
            pattern = _CODE
        elif mark == "}" and in_template:
            pattern = _TEMPLATE
        elif mark == "{" and in_template:
            raise UnreadableExpression("must not build an object inside a template text")
        if match.lastgroup != "space":
            found.append(Token(str(match.lastgroup), match.group(), match.start(), match.end()))
    return found


def compiled(text: str, *, unary: bool) -> "zen.Expression":
    """Compile an expression, so that it can be evaluated many times.

    zen's own `validate_unary_expression` judges a text as if it were not unary (2.1.3), so this is also the check.

    Raises:
        RuntimeError: it does not compile.
    """
    return zen.compile_unary_expression(text) if unary else zen.compile_expression(text)


def zen_reason(error: Exception) -> str:
    """Give what zen says, in one line and without its backtrace; it can quote facts."""
    said = str(error).partition("\n\nStack backtrace")[0]
    try:
        return str(json.loads(said)["source"])
    except (ValueError, TypeError, KeyError):
        return " ".join(said.split())


def faults(text: str, *, unary: bool, in_rule: bool) -> Iterator[str]:
    """Give the rules that an expression breaks; `unary` is a table's cell, which judges the column's value `$`.

    `in_rule` is an expression whose error zen takes for "no match": it can't use `$nodes` or `$root`, because it has to
    give the same result when it is evaluated again to find that error.
    """
    if len(text) > LENGTH_MAX:
        yield f"must have {LENGTH_MAX} characters at most"
        return
    try:
        expression = compiled(text, unary=unary)
    except RuntimeError as error:
        yield f"must be an expression that compiles: {zen_reason(error)}"
        return
    try:
        words = tokens(text)
    except UnreadableExpression as unreadable:
        yield str(unreadable)
        return
    yield from _word_faults(words, in_rule=in_rule)
    if (
        unary
        and [token.text for token in words[:2]] == ["$", "."]
        and all(token.text == "." or token.kind == "word" for token in words)
    ):
        yield f"must compare: zen reads the cell {text} as $ == {text}; write {text} == true"
    samples = [{"$": sample} for sample in _SAMPLES] if unary else [{}]
    is_constant = literal_kinds(words) is not None and (unary or all(word.text != "$" for word in words))
    if is_constant and not any(_evaluates(expression, sample) for sample in samples):
        yield "must not compare or combine values of types that never fit"


def _word_faults(words: list[Token], *, in_rule: bool) -> Iterator[str]:
    for i, token in enumerate(words):
        following = words[i + 1].text if i + 1 < len(words) else ""
        if token.kind == "number" and not _is_exact(token.text):
            yield f"must not use the number {token.text}, which is past 2^53-1 or has more than {DIGITS_MAX} digits"
        if token.kind != "word":
            continue
        if in_rule and token.text in ("$nodes", "$root"):
            yield f"must not use {token.text} in a table or a switch; pass the value through or use an expression node"
        if following != "(" or token.text in _OPERATOR_WORDS:
            continue
        if i > 0 and words[i - 1].text == ".":
            yield f"must not call the method {token.text}(); methods of dates read the clock or the host's time zone"
        elif token.text not in FUNCTIONS:
            yield _WHY_REFUSED.get(token.text, f"must not call {token.text}(), which is not known to be pure")
        elif token.text in DATE_FUNCTIONS and words[i + 2].text.strip("'\"`") == _CLOCK_WORD:
            yield f"must not call {token.text}('{_CLOCK_WORD}'), which reads the clock; use decision.time"


def _is_exact(number: str) -> bool:
    try:
        value = Decimal(number.replace("_", ""))
    except InvalidOperation:
        return False
    _, digits, exponent = value.as_tuple()
    return abs(value) <= NUMBER_MAX and len(digits) <= DIGITS_MAX and int(exponent) >= -DIGITS_MAX


def _evaluates(expression: "zen.Expression", scope: dict[str, object]) -> bool:
    try:
        expression.evaluate(scope)
    except RuntimeError:
        return False
    return True


def literal_kinds(words: list[Token]) -> set[str] | None:
    """Give the kinds of literals in an expression that has only literals, operators and a whole `$`; else None."""
    kinds = set()
    for i, token in enumerate(words):
        if token.kind in ("number", "text"):
            kinds.add(token.kind)
        elif token.text in ("true", "false"):
            kinds.add("boolean")
        elif token.text == "$" and (i + 1 == len(words) or words[i + 1].text not in (".", "[")):
            continue
        elif token.text == "`" or (token.kind == "word" and token.text not in {*_OPERATOR_WORDS, "null"}):
            return None
    return kinds


def plain_kind(cell: str) -> str | None:
    """Give the kind of values ("number", "text" or "boolean") that a table's cell can't fail on; None where it may."""
    return next((kind for kind, pattern in _PLAIN_CELLS.items() if pattern.fullmatch(cell)), None)


def is_literal(text: str) -> bool:
    """Tell whether an expression is a literal, or a list of texts, which can't fail."""
    return _LITERAL.fullmatch(text) is not None


def member_path(text: str) -> tuple[str, ...] | None:
    """Give the names of an expression that only reads a member, such as `facts.loan.amount_minor`; None for others."""
    names = tuple(text.strip(" ").split("."))
    return names if _PATH.fullmatch(text) and names[0] not in _CLOSED_WORDS else None


def reads_only_its_column(words: list[Token]) -> bool:
    """Tell whether a cell depends on nothing but its column's value `$`, so that it can be evaluated with it alone."""
    for i, token in enumerate(words):
        is_member = i > 0 and words[i - 1].text == "."
        is_called = i + 1 < len(words) and words[i + 1].text == "("
        if token.kind == "word" and not (is_member or is_called) and token.text not in _CLOSED_WORDS:
            return False
    return True


def guarded(text: str) -> str:
    """Give the expression with the first argument of every date function turned into null where it is the text "now".

    A date function fails on null, so an argument that comes out as "now" (from the facts, or put together by the
    policy itself) fails the evaluation and never reads the clock.
    """
    words = tokens(text)
    inserts: list[tuple[int, str]] = []
    for i, token in enumerate(words[:-1]):
        if token.kind == "word" and token.text in DATE_FUNCTIONS and words[i + 1].text == "(":
            inserts.append((words[i + 1].end, "filter(["))
            inserts.append((_first_argument_end(words, i + 2), f"], # != '{_CLOCK_WORD}')[0]"))
    for position, insert in sorted(inserts, reverse=True):
        text = text[:position] + insert + text[position:]
    return text


def _first_argument_end(words: list[Token], i: int) -> int:
    depth = 0
    for token in words[i:]:
        if token.kind != "mark":
            continue
        if depth == 0 and token.text in ",)":
            return token.start
        depth += (token.text in ("(", "[", "{", "${")) - (token.text in (")", "]", "}"))
    raise UnreadableExpression("must close every call that it opens")
