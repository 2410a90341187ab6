"""Has the model write what a schema, a pattern or a list allows: python examples/structured_output.py"""

import json
from typing import Any

from octavo import LLM, Constraint, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "Describe a person as JSON.": Constraint(json=PERSON, disable_any_whitespace=True),
    "What is the date of the moon landing?": Constraint(regex=r"\d{4}-\d{2}-\d{2}"),
    "Is Paris in France?": Constraint(choice=["yes", "no"]),
}


def main(**options: Any) -> list[str]:
    texts = []
    with LLM(**options) as llm:
        for question, constraint in CONSTRAINTS.items():
            answer = llm.chat(question, SamplingParams(temperature=0, max_tokens=64, constraint=constraint))
            print(f"{question} {answer.text}")
            texts.append(answer.text)
    print("The person's name is", json.loads(texts[0])["name"])
    return texts


if __name__ == "__main__":
    main()
