"""A question about an image with Octavo's own client, which sends the file again if another router has to go on.

python with_image.py ADDRESS[,ADDRESS...] FILE QUESTION
"""

import sys

from octavo import Client, Delta, SamplingParams


def main(addresses: str, file: str, question: str) -> None:
    content = [{"type": "image", "image": file}, {"type": "text", "text": question}]
    with (
        Client(addresses.split(",")) as client,
        client.stream([{"role": "user", "content": content}], SamplingParams(max_tokens=100, seed=5)) as stream,
    ):
        for event in stream:
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
