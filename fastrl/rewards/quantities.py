"""Numbers in answers: their exact value, and the unit behind or the variable before it."""

import re
from decimal import Decimal
from typing import NamedTuple

_NUMBER = re.compile(
    r"(?:(?P<name>\\?[A-Za-z]+(?:_\{?\w+\}?)?)\s*=\s*)?(?P<sign>[-+]?)\s*(?P<currency>\\?[$€£])?\s*(?P<inner>[-+]?)"
    r"(?P<digits>(?:\d{1,3}(?:(?:,\\!\s?|,|\{,\}|\\,|\\!)\d{3})+|\d+)?(?:\.\d+)?)"
    r"(?:[eE](?P<e>[-+]?\d{1,4})|\s*(?:\\times|\\cdot|[×*])\s*10\s*\^\s*\{?\s*(?P<power>[-+]?\d{1,4})\s*\}?)?"
)
# What may stand behind a number: each with the spaces before it.
_BEHIND = re.compile(
    r"(?P<space>\s*)(?:(?P<percent>\\?%|per\s?cents?(?![^\W\d_]))|(?P<sign>\\?[$€£]|°|\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-z]))"
    r"|(?P<power>\^\s*\{?\s*[23]\s*\}?|[²³])|(?P<word>/|[^\W\d_²³]+)|(?P<hyphen>-))"
)
_MOST_WORDS = 4
_POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_OF_DEGREES = {"c": "celsius", "f": "fahrenheit"}  # alone they are variables
_SIGNS = {"$": "dollar", "€": "euro", "£": "pound"}
# Short, irregular and British names. Words of one or two letters that are not here are variables.
_UNIT_NAMES = {
    **{"m": "meter", "cm": "centimeter", "mm": "millimeter", "km": "kilometer", "metre": "meter", "mi": "mile"},
    **{"centimetre": "centimeter", "millimetre": "millimeter", "kilometre": "kilometer", "litre": "liter"},
    **{"g": "gram", "kg": "kilogram", "mg": "milligram", "ml": "milliliter", "oz": "ounce"},
    **{"s": "second", "sec": "second", "min": "minute", "h": "hour", "hr": "hour", "ft": "foot", "feet": "foot"},
    **{"in": "inch", "inche": "inch", "yd": "yard", "lb": "pound", "sq": "square"},
    **{"/": "per", "people": "person", "children": "child", "hz": "hertz", "kw": "kilowatt", "am": "am", "pm": "pm"},
}
_WORDS = """dozen half halve third quarter fourth fifth sixth seventh eighth ninth tenth hundredth thousandth
    one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty hundred thousand million
    billion trillion lakh crore grand pair gross pct infinity pi alpha beta gamma delta epsilon theta lambda phi rho
    sigma tau omega and not plus minus less more over mod choose divided multiplied squared cubed factorial sqrt log exp
    sin cos tan maybe wrong"""
# With one of them behind it, a number is another number ("two dozen") or a formula.
_NO_UNITS = set(_WORDS.split())


class Quantity(NamedTuple):
    """A number, the variable that it is the value of, and its unit; None where the answer names none."""

    name: str | None
    value: Decimal
    unit: str | None

    def same(self, other: "Quantity") -> bool:
        """Whether the values are equal, and name and unit too where both have them."""
        pairs = ((self.name, other.name), (self.unit, other.unit))
        return self.value == other.value and all(None in pair or pair[0] == pair[1] for pair in pairs)


def quantity_of(text: str) -> Quantity | None:
    r"""The quantity that a text is, or None: `-$1,234.50`, `3 \times 10^5 km`, `5 million`, `5\%`, `18°`, `x = 18`.

    A percentage is its hundredth part. Letters that touch the number, single ones that are no unit's, and words such as
    "dozen" or "squared" make a formula or another number of it, which is no quantity.
    """
    number = _NUMBER.match(text)
    if number is None or not number["digits"] or (number["sign"] and number["inner"]):
        return None
    exponent = int(number["e"] or number["power"] or 0)
    unit = [_SIGNS[number["currency"][-1]]] if number["currency"] else []
    at = number.end()
    while at < len(text):
        found = _BEHIND.match(text, at)
        if found is None:
            return None
        glued = at == number.end() and not found["space"]
        if found["percent"]:
            exponent -= 2
        elif found["sign"]:
            unit.append(_SIGNS.get(found["sign"][-1], "degree"))
        elif found["power"]:
            if not unit:
                return None
            unit[-1] += "^2" if "2" in found["power"] or found["power"] == "²" else "^3"
        elif found["word"]:
            word = found["word"].lower()
            if glued:
                return None
            if at == number.end() and word.removesuffix("s") in _POWERS_OF_TEN:
                exponent += _POWERS_OF_TEN[word.removesuffix("s")]
            elif unit[-1:] == ["degree"] and word in _OF_DEGREES:
                unit.append(_OF_DEGREES[word])
            elif (name := _unit(word)) is None:
                return None
            else:
                unit.append(name)
        elif not unit:
            return None  # a hyphen
        at = found.end()
    if len(unit) > _MOST_WORDS:
        return None
    digits = re.sub(r"[^\d.]", "", number["digits"])
    value = Decimal(f"{number['sign']}{number['inner']}{digits}E{exponent}")
    return Quantity(number["name"], value, " ".join(unit) or None)


def _unit(word: str) -> str | None:
    """The unit's name in the singular; None for what is none."""
    return None if is_no_unit(word) else _UNIT_NAMES.get(_singular(word), _singular(word))


def is_no_unit(word: str) -> bool:
    """Whether a word behind a number makes a formula or another number of it: "dozen", "squared", a single letter."""
    single = _singular(word.lower())
    if single in _UNIT_NAMES:
        return False
    return len(word) < 3 or single in _NO_UNITS or "illion" in single or single.startswith("arc")


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 2 and word.endswith("s") and not word.endswith("ss") else word
