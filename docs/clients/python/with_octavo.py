"""Streams a completion with Octavo's own client, which resumes by itself: pip install octavo-client.

python with_octavo.py ADDRESS[,ADDRESS...] PROMPT [MAX_TOKENS [SEED]]
"""

import sys

from octavo import Client, Delta, SamplingParams


def main(addresses: str, prompt: str, max_tokens: str = "64", seed: str = "0") -> None:
    sampling = SamplingParams(max_tokens=int(max_tokens), seed=int(seed))
    with Client(addresses.split(",")) as client, client.stream(prompt, sampling) as stream:
        for event in stream:
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
