"""Science questions about substances that do not exist, so that a model has to look up the facts.

The facts are in the documents of the search source `gangline:stem`, which `stem_documents` generates. They are part of
the package, one file each, and do not depend on a seed; the questions do.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from gangline.tasks.presets.samples.sample import Sample, take_turns

_NAMES = (
    "Ferrolite",
    "Quenstone",
    "Mirabase",
    "Tessarite",
    "Oldervane",
    "Palegarn",
    "Sundrium",
    "Korvanite",
    "Lumashale",
    "Brackwater salt",
)
_COLOURS: Sequence[str] = ("violet", "amber", "teal", "crimson")
_LETTERS = "ABCD"


@dataclass(frozen=True)
class _Substance:
    name: str
    density: Decimal
    """Grams per cubic centimetre."""
    heat: Decimal
    """Joules per gram and kelvin."""
    molar_mass: Decimal
    """Grams per mole."""
    half_life_h: int
    colour: str

    @property
    def file(self) -> str:
        return f"{self.name.lower().replace(' ', '-')}.md"


def _substances() -> list[_Substance]:
    rng = random.Random("gangline:stem")
    return [
        _Substance(
            name=name,
            density=Decimal(rng.randint(150, 980)) / 100,
            heat=Decimal(rng.randint(30, 290)) / 100,
            molar_mass=Decimal(rng.randint(400, 3200)) / 10,
            half_life_h=rng.randint(3, 60),
            colour=rng.choice(_COLOURS),
        )
        for name in _NAMES
    ]


def stem_documents() -> dict[str, str]:
    """File name -> content, of every document of `gangline:stem`."""
    return {substance.file: _document(substance) for substance in _substances()}


def _document(one: _Substance) -> str:
    return f"""# {one.name}

{one.name} is an invented substance of Gangline's sample questions. No book has it.

## Physical properties

- Density at 20 degrees Celsius: {one.density} g/cm3
- Specific heat capacity: {one.heat} J/(g K)

## Chemistry

- Molar mass: {one.molar_mass} g/mol
- Colour of its solution in water: {one.colour}

## Decay

Its only isotope that occurs in nature decays with a half-life of {one.half_life_h} hours.
"""


def stem_samples(number: int, seed: int) -> list[Sample]:
    return take_turns(_KINDS, number, seed)


def _sample(one: _Substance, domain: str, problem: str, solution: str, right: object, wrong: object) -> Sample:
    row = {"domain": domain, "problem": problem, "matched_solution": f"{solution} Answer: \\boxed{{{right}}}"}
    return Sample(row, str(right), str(wrong), sources=(one.file,))


def _mass(rng: random.Random) -> Sample:
    one, edge = rng.choice(_SUBSTANCES), rng.randint(2, 9)
    right = one.density * edge**3
    problem = f"What is the mass, in grams, of a cube of {one.name} with edges of {edge} cm at 20 degrees Celsius?"
    solution = f"The volume is {edge**3} cubic centimetres; multiply it by the density {one.density}."
    return _sample(one, "Physics", problem, solution, right, right * 2)


def _heat(rng: random.Random) -> Sample:
    one, grams, kelvin = rng.choice(_SUBSTANCES), rng.randint(20, 400), rng.randint(5, 60)
    right = one.heat * grams * kelvin
    problem = f"How much heat, in joules, raises the temperature of {grams} g of {one.name} by {kelvin} K?"
    solution = f"Multiply mass, rise and the specific heat capacity {one.heat}."
    return _sample(one, "Thermodynamics", problem, solution, right, right / 2)


def _grams(rng: random.Random) -> Sample:
    one, moles = rng.choice(_SUBSTANCES), rng.randint(2, 30)
    right = one.molar_mass * moles
    problem = f"What is the mass, in grams, of {moles} mol of {one.name}?"
    return _sample(one, "Chemistry", problem, f"The molar mass is {one.molar_mass} g/mol.", right, right + moles * 9)


def _decay(rng: random.Random) -> Sample:
    one, times = rng.choice(_SUBSTANCES), rng.randint(2, 4)
    grams, hours = 64 * rng.randint(1, 9), one.half_life_h * times
    right = grams // 2**times
    problem = f"Of {grams} g of the natural isotope of {one.name}, how many grams are left after {hours} hours?"
    return _sample(one, "Nuclear physics", problem, f"That is {times} half-lives.", right, grams // 2 ** (times - 1))


def _colour(rng: random.Random) -> Sample:
    one, order = rng.choice(_SUBSTANCES), rng.sample(_COLOURS, 4)
    options = "\n".join(f"{letter}. {colour}" for letter, colour in zip(_LETTERS, order, strict=True))
    at = order.index(one.colour)
    problem = f"Which colour has a solution of {one.name} in water?\n\n{options}"
    return _sample(one, "Chemistry", problem, f"It is {one.colour}.", _LETTERS[at], _LETTERS[(at + 1) % 4])


_SUBSTANCES = _substances()
_KINDS = (_mass, _heat, _grams, _decay, _colour)
