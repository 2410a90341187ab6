"""Routing of tokens to experts."""

from typing import Literal

Scoring = Literal["softmax", "sigmoid"]
