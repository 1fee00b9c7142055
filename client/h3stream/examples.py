"""The prompts that a model suggests: which one a number means, and how they are listed."""

from __future__ import annotations

from collections.abc import Sequence

from h3stream.errors import FieldViolation
from h3stream.fields import invalid_request


def example_of(examples: Sequence[str], number: int) -> str:
    """The example of a number, which counts from 1. Raises InvalidRequestError if there is none."""
    if not examples:
        rule = "this model suggests no examples; give a PROMPT"
    elif number > len(examples):
        rule = f"this model has {len(examples)} examples; the nearest valid value is {len(examples)}"
    else:
        return examples[number - 1]
    raise invalid_request([FieldViolation("prompt", f"example is {number}; {rule}")])


def example_table(examples: Sequence[str]) -> list[str]:
    """The examples in lines, each with its number; "none" if there are none."""
    return [f"{number:2}  {example}" for number, example in enumerate(examples, start=1)] or ["none"]
