"""Mathematical problems whose answers follow from their construction."""

from __future__ import annotations

import math
import random
from fractions import Fraction

from gangline.tasks.presets.samples.sample import Sample, take_turns


def math_samples(number: int, seed: int) -> list[Sample]:
    return take_turns(_KINDS, number, seed)


def _sample(problem: str, right: object, wrong: object, solution: str) -> Sample:
    answer = str(right)
    row = {"problem": problem, "answer": answer, "solution": f"{solution} The answer is \\boxed{{{answer}}}."}
    return Sample(row, answer, str(wrong))


def _latex(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _power_modulo(rng: random.Random) -> Sample:
    base, exponent, modulus = rng.randint(3, 19), rng.randint(50, 200), rng.randint(23, 97)
    right = pow(base, exponent, modulus)
    problem = f"Find the remainder when ${base}^{{{exponent}}}$ is divided by ${modulus}$."
    return _sample(problem, right, (right + 1) % modulus, "Square repeatedly and reduce after each step.")


def _digit_sum(rng: random.Random) -> Sample:
    base, exponent = rng.randint(2, 9), rng.randint(30, 90)
    right = sum(map(int, str(base**exponent)))
    return _sample(
        f"What is the sum of the digits of ${base}^{{{exponent}}}$?", right, right + 9, "Write the power out."
    )


def _linear_system(rng: random.Random) -> Sample:
    x, y = rng.randint(-9, 9), rng.randint(-9, 9)
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    c, d = a + rng.randint(1, 5), -b
    problem = (
        f"Solve the system ${a}x + {b}y = {a * x + b * y}$ and ${c}x - {b}y = {c * x + d * y}$. Give the pair $(x, y)$."
    )
    return _sample(problem, f"({x}, {y})", f"({y + 1}, {x})", "Add both equations; $y$ vanishes.")


def _quadratic_roots(rng: random.Random) -> Sample:
    first = rng.randint(-9, 8)
    second = rng.randint(first + 1, 9)
    total, product = first + second, first * second
    problem = f"Find the set of all real solutions of $x^2 + ({-total})x + ({product}) = 0$."
    right, wrong = rf"\{{{first}, {second}\}}", rf"\{{{first}, {second + 1}\}}"
    return _sample(problem, right, wrong, f"It factors as $(x - ({first}))(x - ({second}))$.")


def _integral(rng: random.Random) -> Sample:
    power, factor, upper = rng.randint(2, 6), rng.randint(1, 9), rng.randint(2, 4)
    right = Fraction(factor * upper ** (power + 1), power + 1)
    problem = rf"Evaluate $\int_0^{upper} {factor}x^{power} \, dx$ as a fraction in lowest terms."
    return _sample(problem, _latex(right), _latex(right + 1), "Use the power rule.")


def _committee(rng: random.Random) -> Sample:
    women, men, seats = rng.randint(4, 8), rng.randint(4, 8), rng.randint(3, 4)
    right = math.comb(women + men, seats) - math.comb(men, seats)
    problem = (
        f"A committee of ${seats}$ is chosen from ${women}$ women and ${men}$ men. In how many ways can it be chosen "
        "so that at least one woman is on it?"
    )
    return _sample(problem, right, math.comb(women + men, seats), "Subtract the committees without a woman.")


def _telescope(rng: random.Random) -> Sample:
    last, step = rng.randint(10, 60), rng.randint(1, 4)
    right = sum((Fraction(1, k * (k + step)) for k in range(1, last + 1)), Fraction(0))
    problem = rf"Find $\sum_{{k=1}}^{{{last}}} \frac{{1}}{{k(k+{step})}}$ as a fraction in lowest terms."
    return _sample(problem, _latex(right), _latex(right / 2), "Split each term into partial fractions.")


def _inequality(rng: random.Random) -> Sample:
    middle, radius = rng.randint(-6, 6), rng.randint(1, 6)
    problem = f"Solve $|x - ({middle})| < {radius}$. Give the solution as an interval."
    low, high = middle - radius, middle + radius
    return _sample(problem, f"({low}, {high})", f"({low}, {high + 1})", "Remove the absolute value.")


def _derivative(rng: random.Random) -> Sample:
    a, b, at = rng.randint(2, 7), rng.randint(2, 7), rng.randint(-4, 4)
    right = 3 * a * at**2 + 2 * b * at
    problem = f"Let $f(x) = {a}x^3 + {b}x^2 - 5$. Find $f'({at})$."
    return _sample(problem, right, right + a, f"$f'(x) = {3 * a}x^2 + {2 * b}x$.")


def _dice(rng: random.Random) -> Sample:
    sides, total = rng.randint(6, 12), rng.randint(5, 9)
    hits = sum(1 for one in range(1, sides + 1) for other in range(1, sides + 1) if one + other == total)
    right = Fraction(hits, sides**2)
    problem = (
        f"Two fair dice with the faces $1$ to ${sides}$ are rolled. What is the probability that they sum to ${total}$?"
    )
    return _sample(problem, _latex(right), _latex(right + Fraction(1, sides**2)), "Count the pairs.")


_KINDS = (
    _power_modulo,
    _digit_sum,
    _linear_system,
    _quadratic_roots,
    _integral,
    _committee,
    _telescope,
    _inequality,
    _derivative,
    _dice,
)
