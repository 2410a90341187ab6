"""What a router's logits become before experts are chosen by them."""

from typing import Literal

Scoring = Literal["softmax", "sigmoid"]
